#!/bin/sh
# Makes this process a marked process group leader, then execs the user's argv.
# Runs by `sh -c 'eval "$1"' sh TEXT DIR UID TURN NUMBER BRAND NAMESPACE ARGV...`; builtins only in
# the normal case. Positional parameters stay untouched until the last line: setsid gets them whole.
# shellcheck disable=SC2034  # fields that are read only to be skipped
# shellcheck disable=SC2016  # the text that sh -c evals must reach it unexpanded
# shellcheck disable=SC3045  # ulimit -S is in dash, bash and busybox ash

_fence_fail() {
  printf 'fence: %s; the command was not started\n' "$1" >&2
  exit 125
}

# STEP leader. /proc/self, not /proc/$$: the two differ where /proc is of another pid namespace. The
# fields of stat up to 22, start time; the name in parentheses is this shell's, one word.
_fence_pid=
read -r _fence_pid _fence_a _fence_b _fence_c _fence_pgrp _fence_d _fence_tty \
  _fence_e _fence_e _fence_e _fence_e _fence_e _fence_e _fence_e _fence_e _fence_e _fence_e \
  _fence_e _fence_e _fence_e _fence_e _fence_start _fence_e 2>/dev/null </proc/self/stat ||
  _fence_fail 'no readable /proc'
case $_fence_pid$_fence_a$_fence_start in
"$$"'('*')'*[0-9]) ;;
*) _fence_fail '/proc belongs to another pid namespace than the command' ;;
esac
# A group leader would fork in setsid(1) and lose its exit code; a session with a terminal keeps it.
if [ "$_fence_pgrp" != "$$" ] && [ "$_fence_tty" = 0 ]; then
  if command -v setsid >/dev/null 2>&1; then
    exec setsid /bin/sh -c 'eval "$1"' sh "$@"
  elif command -v busybox >/dev/null 2>&1; then
    exec busybox setsid /bin/sh -c 'eval "$1"' sh "$@"
  elif command -v perl >/dev/null 2>&1; then
    exec perl -MPOSIX -e 'POSIX::setsid(); exec @ARGV' /bin/sh -c 'eval "$1"' sh "$@"
  elif command -v python3 >/dev/null 2>&1; then
    exec python3 -c 'import os,sys;os.setsid();os.execv(sys.argv[1],sys.argv[1:])' \
      /bin/sh -c 'eval "$1"' sh "$@"
  fi
  _fence_fail 'the provider starts commands inside a process group and there is no setsid, busybox, perl or python3'
fi

# STEP brand. Only over "unlimited": a limit that is there is the user's, or an outer fence's brand.
# Then the hard limit is unlimited too, so ulimit cannot fail (dash would exit).
_fence_brand=-
if [ "$6" != - ]; then
  while read -r _fence_a _fence_b _fence_c _fence_soft _fence_d; do
    if [ "$_fence_a $_fence_b $_fence_c" = 'Max cpu time' ]; then
      if [ "$_fence_soft" = unlimited ]; then
        ulimit -S -t "$6" && _fence_brand=$6
      fi
      break
    fi
  done 2>/dev/null </proc/self/limits
fi

# STEP environ. Visible in /proc only after the exec; until then marker and brand speak.
FENCE_LINEAGE="${FENCE_LINEAGE-}:$4.$5."
export FENCE_LINEAGE

# STEP namespace. fdinfo shows the inode since Linux 5.14; before, pid 1's start time stands for it.
_fence_ns=-
while read -r _fence_a _fence_b; do
  [ "$_fence_a" = ino: ] && _fence_ns=i$_fence_b
done 2>/dev/null 3</proc/self/ns/pid </proc/self/fdinfo/3
if [ "$_fence_ns" = - ] && read -r _fence_a 2>/dev/null </proc/1/stat; then
  _fence_first() { _fence_ns=s${20}; }
  # shellcheck disable=SC2086  # split on purpose: numbers
  _fence_first ${_fence_a##*) }
fi
if [ "$7" != - ] && [ "$_fence_ns" != - ] && [ "$_fence_ns" != "$7" ]; then
  _fence_fail 'the control channel looks at another pid namespace than the command runs in'
fi

# STEP directory. The prepare run made one for this very turn: a command that does not see it, because
# its /tmp is its own or was emptied, would not see the tombstone either.
_fence_refuse() {
  printf 'fence: the turn is cancelled; the command was not started\n' >&2
  exit 130
}
_fence_dir=$2/$3/$4
if [ ! -d "$_fence_dir" ]; then
  # A turn that is proved has no markers any more, only its tombstone.
  [ ! -e "$2/$4.cancelled" ] || _fence_refuse
  _fence_fail "it does not see the directory that the control channel made in $2"
fi

# STEP marker. mkdir is needed only for a uid that is not the control's.
_fence_boot=-
read -r _fence_boot 2>/dev/null </proc/sys/kernel/random/boot_id
if [ ! -O "$_fence_dir" ] || [ -L "$_fence_dir" ]; then
  _fence_uid=
  while read -r _fence_a _fence_b _fence_c _fence_d; do
    [ "$_fence_a" = Uid: ] && _fence_uid=$_fence_c && break
  done 2>/dev/null </proc/self/status
  [ -n "$_fence_uid" ] || _fence_fail 'cannot tell the own uid'
  _fence_dir=$2/$_fence_uid
  [ -d "$_fence_dir" ] || mkdir -m 711 "$_fence_dir" 2>/dev/null
  if [ ! -O "$_fence_dir" ] || [ -L "$_fence_dir" ]; then
    _fence_fail "cannot make its marker directory under $2"
  fi
  _fence_dir=$_fence_dir/$4
  [ -d "$_fence_dir" ] || mkdir -m 700 "$_fence_dir" 2>/dev/null
  if [ ! -d "$_fence_dir" ] || [ ! -O "$_fence_dir" ] || [ -L "$_fence_dir" ]; then
    _fence_fail "cannot make its marker directory under $2"
  fi
fi
# No clobber: a start that the transport delivers twice runs once.
set -C
echo "fence1 $$ $_fence_start $_fence_boot $_fence_ns $_fence_brand" 2>/dev/null >"$_fence_dir/$5" ||
  _fence_fail "cannot write its marker under $2, or this command was started before"

# STEP tombstone. After the marker: the sweep writes the tombstone before it scans, so one of the
# two always sees the other.
if [ -e "$2/$4.cancelled" ] || [ -e "$2/$4.$5.cancelled" ]; then
  echo refused 2>/dev/null >>"$_fence_dir/$5"
  _fence_refuse
fi

# STEP exec
shift 7
exec "$@"
