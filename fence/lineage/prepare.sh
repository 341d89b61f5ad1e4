#!/bin/sh
# Makes the directory of markers and tombstones and says which containment this sandbox offers.
# Arguments: PROTOCOL TURN RUN. Prints one report; exit 0 unless the sandbox is refused (76).
# shellcheck disable=SC2034  # fields that are read only to be skipped

trap '' HUP PIPE
turn=$2
printf 'fence-prepare 1 %s %s\n' "$turn" "$3"

note() {
  printf 'n %s\n' "$1"
}

refuse() {
  printf 'refused %s\n' "$1"
  exit 76
}

fields() {
  start=${20}
}

line=
read -r line 2>/dev/null </proc/self/stat || refuse 'no readable /proc'
uid=
while read -r a b c d; do
  [ "$a" = Uid: ] && uid=$c && break
done 2>/dev/null </proc/self/status
[ -n "$uid" ] || refuse 'no Uid in /proc/self/status'

namespace=-
while read -r a b; do
  [ "$a" = ino: ] && namespace=i$b
done 2>/dev/null 3</proc/self/ns/pid </proc/self/fdinfo/3
if [ "$namespace" = - ] && read -r line 2>/dev/null </proc/1/stat; then
  # shellcheck disable=SC2086  # split on purpose: numbers
  fields ${line##*) }
  namespace=s$start
fi

owned_by_root() {
  # shellcheck disable=SC2046,SC2012  # split on purpose; numbers only, and the name is ours
  set -- $(ls -nd "$1" 2>/dev/null)
  [ "${3-}" = 0 ]
}

# Owned by root or by us, not a symlink, and then sticky and open to every uid.
usable() {
  [ -d "$1" ] && [ ! -L "$1" ] || return 1
  [ -w "$1" ] && [ -x "$1" ] || return 1
  [ -O "$1" ] || owned_by_root "$1" || return 1
  own=$1/$uid
  # Every uid may pass through it, to see whether the turn's own directory is there.
  [ -d "$own" ] || mkdir -m 711 "$own" 2>/dev/null
  [ -d "$own" ] && [ -O "$own" ] && [ ! -L "$own" ] || return 1
  [ -d "$own/$turn" ] || mkdir -m 700 "$own/$turn" 2>/dev/null
  [ -d "$own/$turn" ] && [ -O "$own/$turn" ] && [ ! -L "$own/$turn" ] || return 1
  # A full disk still makes directories; only bytes read back prove that a marker can be written.
  echo probe 2>/dev/null >"$own/$turn/probe" || return 1
  line=
  read -r line 2>/dev/null <"$own/$turn/probe"
  [ "$line" = probe ] || return 1
}

directory=
for candidate in /tmp/.fence /var/tmp/.fence /dev/shm/.fence "/tmp/.fence-$uid"; do
  if [ ! -e "$candidate" ] && [ ! -L "$candidate" ]; then
    mkdir -m 1777 "$candidate" 2>/dev/null
  fi
  if usable "$candidate"; then
    directory=$candidate
    break
  fi
  note "$candidate cannot be used"
done
[ -n "$directory" ] || refuse 'no directory for markers: /tmp, /var/tmp and /dev/shm are read-only, full or taken by another user'

if [ -e "$directory/$turn.cancelled" ]; then
  rm -rf "${directory:?}/$uid/${turn:?}" 2>/dev/null
  printf 'stopped before\n'
  exit 76
fi

brand=0
while read -r a b c soft d; do
  if [ "$a $b $c" = 'Max cpu time' ]; then
    if [ "$soft" != unlimited ]; then
      note 'a CPU-time limit is set already, so commands carry no brand'
    else
      brand=1
    fi
    break
  fi
done 2>/dev/null </proc/self/limits
[ -r /proc/self/limits ] || note 'no /proc/PID/limits in this kernel, so commands carry no brand'

containment=lineage
[ "$brand" = 1 ] || containment=lineage-unbranded
if ! read -r line 2>/dev/null </proc/1/stat; then
  containment='own-uid'
  note '/proc hides the processes of other users (hidepid)'
fi
command -v grep >/dev/null 2>&1 || note 'no grep: the sweep looks at each process by itself, slower'
if command -v find >/dev/null 2>&1; then
  # Tombstones live for a day; what a crashed turn left behind, for a week.
  find "$directory" -mindepth 1 -maxdepth 1 -name '*.cancelled' -mtime +0 \
    -exec rm -f {} + 2>/dev/null
  find "$directory/$uid" -mindepth 1 -maxdepth 1 -mtime +6 -exec rm -rf {} + 2>/dev/null
fi

printf 'end %s %s %s %s %s\n' "$directory" "$uid" "$namespace" "$containment" "$brand"
