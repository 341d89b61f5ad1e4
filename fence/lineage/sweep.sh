#!/bin/sh
# Stops everything that a turn (or one of its commands) started, and proves it.
# Arguments: PROTOCOL TURN RUN SCOPE MODE BRANDS INT TERM TOTAL NO_INT MAX WITNESS;
#   times in 1/100 s.
#   SCOPE "-" or a command's number; MODE stop or look; BRANDS a case pattern or "-";
#   NO_INT ",3,5,": commands whose PTY was just sent Ctrl-C. WITNESS the mark, for grep to find in our
#   own command line: a grep that does not find it did not look.
# Prints one report (see report.py); exit 0 clear, 75 still alive, 76 could not tell.
# No user text is ever evaluated: eval sees numbers and the names of our own variables.
# shellcheck disable=SC2034  # fields that are read only to be skipped, and eval's variables
# shellcheck disable=SC2154  # variables that eval assigns

trap '' HUP PIPE
umask 022
LC_ALL=C
export LC_ALL
# The host's taste in listings must not hide a marker: GNU ls obeys these.
unset TIME_STYLE QUOTING_STYLE BLOCK_SIZE LS_BLOCK_SIZE POSIXLY_CORRECT
turn=$2 run=$3 scope=$4 mode=$5 brands=$6 int_grace=$7 term_grace=$8 total=$9
shift 9
no_int=$1 max=$2

mark=":$turn."
regex=":${turn}[.]"
if [ "$scope" != - ]; then
  mark="$mark$scope."
  regex="${regex}${scope}[.]"
fi
brand_regex="^Max cpu time  *$brands  *"

count=0     # records, numbered from 1; a record is one (pid, start time)
live=''     # numbers of the records not seen gone yet
doubt=0     # 1: something could not be looked at, so nothing is proved
unbranded=0 # 1: a command of the turn carries no brand, or none that is its alone
scans=0 unseen=0 snapshot=sampled containment=lineage notes='' markers=''
if [ "$brands" = - ]; then
  unbranded=1
  brand_regex='^no brand$'
fi
nl='
'

note() {
  case $nl$notes in
  *"${nl}n $1$nl"*) ;;
  *) notes="${notes}n $1$nl" ;;
  esac
}

cannot_tell() {
  doubt=1
  note "$1"
}

clock() {
  now=
  read -r up idle 2>/dev/null </proc/uptime || return 1
  now=$((${up%.*} * 100 + 1${up#*.} - 100))
}

pause() {
  # Without a sleep that takes fractions the next look is the pause.
  [ "$fractions" = 1 ] || return 0
  sleep "$1" 2>/dev/null || fractions=0
}
fractions=1

fields() {
  state=$1 ppid=$2 pgid=$3 sid=$4 tty=$5 tpgid=$6 threads=${18} start=${20}
}

# Reads /proc/PID/stat whole: the name may hold newlines and ")", the numbers after it may not.
# 0: fields are set. 1: no such process. 2: it is there and cannot be read.
look() {
  text=
  while read -r part || [ -n "$part" ]; do
    text="$text $part"
  done 2>/dev/null <"/proc/$1/stat"
  case $text in
  *") "*" "*) ;;
  *)
    [ -e "/proc/$1" ] || return 1
    return 2
    ;;
  esac
  # shellcheck disable=SC2086  # split on purpose: numbers
  fields ${text##*) }
  [ -n "$start" ] || return 2
}

# Sets the printable name from the text that look() left behind.
name_of_text() {
  name=${text#*\(}
  name=${name%)*}
  case $name in
  '' | *[!A-Za-z0-9_.:/+@-]*)
    rest=$name name=''
    while [ -n "$rest" ]; do
      char=${rest%"${rest#?}"}
      rest=${rest#?}
      case $char in
      [A-Za-z0-9_.:/+@-]) name=$name$char ;;
      *) name="$name?" ;;
      esac
    done
    ;;
  esac
}

# bash reads ahead and gives back what it did not use by lseek(2). Where that fails, because the
# process is gone, the rest would be served as the next file's content. /dev/null takes it back.
settle() { :; }
if [ -n "${BASH_VERSION-}" ]; then
  settle() { read -r rest </dev/null; }
fi

# Signal masks and the uid, from /proc/PID/status.
status() {
  uid=- pending=0 shared=0 ignored=0
  while read -r key one two rest; do
    case $key in
    Uid:) uid=$two ;;
    SigPnd:) pending=$one ;;
    ShdPnd:) shared=$one ;;
    SigIgn:)
      ignored=$one
      break
      ;;
    esac
  done 2>/dev/null <"/proc/$1/status"
  settle
}

# Signals 2 and 15 are bits 1 and 14 of the hex masks.
holds_int() {
  case $1 in *[2367abef]) return 0 ;; esac
  return 1
}
holds_term() {
  case $1 in *[4567cdef]???) return 0 ;; esac
  return 1
}

# Sets limit to the soft CPU-time limit of a pid, or nothing.
limit_of() {
  limit=
  while read -r one two three four rest; do
    if [ "$one $two $three" = 'Max cpu time' ]; then
      limit=$four
      break
    fi
  done 2>/dev/null <"/proc/$1/limits"
  settle
}

# Sets lineages to what a pid's environment says (any of its threads': a zombie leader has none).
lineages_of() {
  lineages=
  for file in "/proc/$1/environ" "/proc/$1/task/"*/environ; do
    while read -r part || [ -n "$part" ]; do
      case $part in *FENCE_LINEAGE=*) add_lineages "$part" ;; esac
    done 2>/dev/null <"$file"
    [ -z "$lineages" ] || break
  done
}

# The NULs are gone, so a value ends with the next variable's name, at its "=": what other variables
# hold is no mark. Split by IFS: to cut a prefix off takes quadratic time, 5 s for 120 KB.
add_lineages() {
  before_value=0
  set -f
  IFS='='
  for word in $1; do
    if [ "$before_value" = 1 ]; then
      # Only what marked() asks for: this turn, one that could have its brands, any other.
      case $word in *":${turn%"${turn#??????}"}"*) lineages="$lineages:$word" ;; *) lineages=${lineages:-:} ;; esac
    fi
    case $word in *FENCE_LINEAGE) before_value=1 ;; *) before_value=0 ;; esac
  done
  unset IFS
  set +f
}

# Sets command to the number that lineages gives the turn, the innermost; - for none of ours.
number_in_lineages() {
  set -f
  IFS=':'
  for word in $lineages; do
    case $word in "$turn".*) command=${word#"$turn".} ;; esac
  done
  unset IFS
  set +f
  command=${command%%.*}
  case $command in '' | 0* | *[!0-9]* | ??????????*) command=- ;; esac
}

# Is this pid the turn's by its own marks? Sets evidence, command, problem. Builtins only: it stands
# between two reads of the start time.
marked() {
  evidence='' command=- problem=-
  limit_of "$1"
  # shellcheck disable=SC2254  # a pattern on purpose
  case $limit in
  $brands)
    evidence=brand
    command=${limit#"${limit%???}"}
    command=${command#0}
    command=${command#0}
    # Another turn has these brands too when the first 24 bits of its key are the same. Who names
    # only that turn may be its own, or ours in disguise: neither signal it nor call it gone.
    if [ "$2" != chase ] && [ "$2" != both ]; then
      lineages_of "$1"
      case $lineages in
      *"$mark"* | '') ;;
      *":${turn%"${turn#??????}"}"*) problem=other-turn ;;
      esac
    fi
    return 0
    ;;
  esac
  if [ "$2" = environ ] || { [ "$2" = chase ] && [ "$unbranded" = 1 ]; }; then
    lineages_of "$1"
    case $lineages in
    *"$mark"*)
      evidence=environ
      if [ "$scope" != - ]; then
        command=$scope
      else
        number_in_lineages
      fi
      return 0
      ;;
    esac
  fi
  return 1
}

# Finds the record of (pid, start) or makes one; sets k.
record() {
  eval "k=\${i_$1:-0}"
  if [ "$k" != 0 ]; then
    eval "[ \"\$s_$k\" = \"$start\" ]" && return 0
  fi
  count=$((count + 1))
  k=$count
  name_of_text
  eval "i_$1=$k p_$k=$1 s_$k=$start a_$k=$ppid b_$k=$pgid c_$k=$sid u_$k=- n_$k=\$command" \
    "e_$k=\$evidence l_$k=alive t_$k=\$state m_$k=\$name g_$k= w_$k=new f_$k=$now z_$k=- x_$k=\$problem"
  # The foreground group of a PTY that has just been sent Ctrl-C has had its SIGINT.
  case $no_int in
  *",$command,"*)
    if [ "$tty" != 0 ] && [ "$pgid" = "$tpgid" ]; then
      eval "w_$k=int g_$k=PTY@0"
    fi
    ;;
  esac
  # At most one SIGINT each: a handler may take the second for "abort". A tombstone that was there
  # before says that a sweep has been here and has sent it, whatever became of its reply.
  if [ "$again" = 1 ] || { [ "$scope" = - ] && buried_before "$command"; }; then
    eval "w_$k=int"
  fi
  live="$live $k"
}

buried_before() {
  [ "$1" != - ] || return 1
  for directory in $directories; do
    [ ! -e "$directory/$turn.$1.cancelled" ] || return 0
  done
  return 1
}

# Is a zombie: the leader's state, and that of each thread (proc(5): a leader that ended alone shows
# Z while its other threads still run). 2: threads cannot be listed.
all_dead() {
  case $threads in 0 | 1) return 0 ;; esac
  seen=0
  kept="$state $ppid $pgid $sid $tty $tpgid"
  kept_start=$start kept_text=$text
  dead=0
  for file in "/proc/$1/task/"[0-9]*; do
    [ -e "$file" ] || continue
    seen=$((seen + 1))
    look "$1/task/${file##*/}"
    case $? in
    0) case $state in Z | X) ;; *) dead=1 ;; esac ;;
    2) [ "$dead" = 1 ] || dead=2 ;;
    esac
  done
  # shellcheck disable=SC2086
  set -- $kept
  state=$1 ppid=$2 pgid=$3 sid=$4 tty=$5 tpgid=$6 start=$kept_start text=$kept_text
  [ "$seen" -gt 0 ] || dead=2
  return "$dead"
}

# Sets verdict to gone, alive or unknown for record k, and notes when it was seen gone.
judge() {
  eval "pid=\$p_$k begun=\$s_$k"
  look "$pid"
  case $? in
  1) verdict=gone state=X ;;
  2) verdict=unknown state='?' ;;
  *)
    if [ "$start" != "$begun" ]; then
      verdict=gone state=X
    else
      case $state in
      Z | X)
        all_dead "$pid"
        case $? in
        0) verdict=gone ;;
        1) verdict=alive ;;
        *) verdict=unknown ;;
        esac
        ;;
      *) verdict=alive ;;
      esac
    fi
    ;;
  esac
  eval "l_$k=$verdict t_$k=\$state"
  [ "$verdict" != gone ] || eval "z_$k=$(((now - begin) * 10))"
}

# Drops the records that are gone from live.
look_again() {
  clock
  still=
  for k in $live; do
    judge
    [ "$verdict" = gone ] || still="$still $k"
  done
  live=$still
}

# Nothing that was frozen here stays frozen, also when the sweep itself is told to end.
thaw() {
  for k in $live; do
    eval "signals=\$g_$k"
    case $signals in *STOP@*) case $signals in *KILL@*) ;; *) send CONT ;; esac ;; esac
  done
}
trap 'thaw; exit 76' TERM INT

# Sends a signal to record k if pid and start time are still the scanned ones: kill is a builtin, so
# nothing but a few instructions lies between the look and the signal.
send() {
  eval "pid=\$p_$k begun=\$s_$k problem=\$x_$k"
  case $problem in other-turn | ancestor | init) return 1 ;; esac
  look "$pid" || return 1
  [ "$start" = "$begun" ] || return 1
  if kill "-$1" "$pid" 2>/dev/null; then
    eval "g_$k=\"\${g_$k:+\$g_$k,}$1@$(((now - begin) * 10))\" x_$k=-"
    return 0
  fi
  [ -e "/proc/$pid" ] && eval "x_$k=EPERM"
  return 1
}

# Adds a candidate pid to the records if its marks say so. $2: environ where grep saw the variable.
consider() {
  look "$1"
  case $? in
  1) return 0 ;;
  2)
    # Without grep nothing says whose it is: other users' processes may be hidden like that.
    [ "$grep" = 0 ] || cannot_tell "process $1 bears a mark of the turn and cannot be read"
    return 0
    ;;
  esac
  case $state in
  Z | X)
    all_dead "$1" && return 0
    ;;
  esac
  before=$start
  marked "$1" "$2" || return 0
  case $skip in
  *" $1 "*)
    problem=ancestor
    [ "$1" != 1 ] || problem=init
    ;;
  esac
  start=$before
  record "$1"
}

# One pass over all processes: by mark, then closed over group, session and parent.
scan() {
  scans=$((scans + 1))
  clock
  known=$count
  if [ "$grep" = 1 ]; then
    # One fork; the child tells its pid, so that the chase does not take it for an unseen one.
    found=$(
      read -r me rest </proc/self/stat
      echo "$me"
      exec grep -ls -e "$regex" -e "$brand_regex" /proc/[0-9]*/limits \
        /proc/[0-9]*/task/[0-9]*/environ "/proc/$$/cmdline" 2>/dev/null
    )
    own="$own ${found%%"$nl"*} "
    case $found in
    *"/proc/$$/cmdline") ;;
    *) grep_failed ;;
    esac
  fi
  if [ "$grep" = 1 ]; then
    branded=' ' named=' '
    for file in $found; do
      pid=${file#/proc/}
      pid=${pid%%/*}
      case $file in
      */limits) branded="$branded$pid " ;;
      */environ) case $named in *" $pid "*) ;; *) named="$named$pid " ;; esac ;;
      esac
    done
    for pid in $branded; do
      case $named in *" $pid "*) consider "$pid" both ;; *) consider "$pid" brand ;; esac
    done
    for pid in $named; do
      case $branded in *" $pid "*) ;; *) consider "$pid" environ ;; esac
    done
  else
    for file in /proc/[0-9]*; do consider "${file#/proc/}" environ; done
  fi
  if [ "$scans" = 1 ]; then read_markers; fi
  close_over
  if [ "$count" -gt "$max" ]; then
    cannot_tell "more than $max processes"
  fi
  [ "$count" -gt "$known" ]
}

# A grep that does not end with the witness was not there, was killed or had no memory.
grep_failed() {
  grep=0
  note 'grep failed: each process was looked at by itself'
}

# Group, session and parent, where the leader or parent is itself a live record.
close_over() {
  round=0
  edge=$live
  while [ -n "$edge" ] && [ "$round" -lt 20 ]; do
    round=$((round + 1))
    ids='' leaders=' '
    for k in $edge; do
      eval "ids=\"\$ids|\$p_$k\" leaders=\"\$leaders\$p_$k \""
    done
    if [ "$grep" = 1 ]; then
      found=$(
        read -r me rest </proc/self/stat
        echo "$me"
        exec grep -lsE -e "\\) [A-Za-z] ([0-9]+ )?([0-9]+ )?(${ids#|}) " -e "^$$ " \
          /proc/[0-9]*/stat "/proc//$$/stat" 2>/dev/null
      )
      own="$own ${found%%"$nl"*} "
      case $found in *"/proc//$$/stat") ;; *) grep_failed ;; esac
    fi
    [ "$grep" = 1 ] || found=$(echo /proc/[0-9]*/stat)
    fresh=$count
    for file in $found; do
      case $file in /proc/[0-9]*) ;; *) continue ;; esac
      pid=${file#/proc/}
      pid=${pid%/stat}
      case $skip in *" $pid "*) continue ;; esac
      look "$pid" || continue
      case $state in Z | X) all_dead "$pid" && continue ;; esac
      evidence='' command=- problem=-
      case $leaders in
      *" $ppid "*) evidence=parent from=$ppid ;;
      *" $pgid "*) evidence=group from=$pgid ;;
      *" $sid "*) evidence=session from=$sid ;;
      *) continue ;;
      esac
      eval "from=\$i_$from"
      eval "command=\$n_$from trouble=\$x_$from"
      case $trouble in other-turn | ancestor | init) continue ;; esac
      keep="$state $ppid $pgid $sid $tty $tpgid" keep_start=$start keep_text=$text
      k=$from
      judge_quietly || continue
      # shellcheck disable=SC2086
      restore $keep
      start=$keep_start text=$keep_text
      record "$pid"
    done
    edge=
    k=$fresh
    while [ "$k" -lt "$count" ]; do
      k=$((k + 1))
      edge="$edge $k"
    done
  done
}

restore() {
  state=$1 ppid=$2 pgid=$3 sid=$4 tty=$5 tpgid=$6
}

# Is record k still the process it was (a zombie leader keeps its number, so it counts)?
judge_quietly() {
  eval "look \"\$p_$k\"" && eval "[ \"\$start\" = \"\$s_$k\" ]"
}

# The marker of each command: who its first process is. Files of another owner than their directory
# says, of odd size or kind, are never read; what they say is believed only for that owner's process.
read_markers() {
  read -r boot 2>/dev/null </proc/sys/kernel/random/boot_id || boot=-
  own_namespace
  listed=0 strange=0 mine=' '
  clock
  reading=$now
  for directory in $directories; do
    read_tombstone "$directory/$turn.cancelled"
    for place in "$directory/$me_uid/$turn" "$directory"/[0-9]*/"$turn"; do
      if [ ! -d "$place" ] || [ -L "$place" ]; then continue; fi
      owner=${place%/*}
      owner=${owner##*/}
      case $owner in *[!0-9]*) continue ;; esac
      # shellcheck disable=SC2012  # -n, and the names are checked to be numbers
      listing=$(
        read -r me rest </proc/self/stat
        echo "$me"
        exec ls -ln "$place" 2>/dev/null
      )
      own="$own ${listing%%"$nl"*} "
      set -f
      IFS=$nl
      # shellcheck disable=SC2086
      set -- $listing
      unset IFS
      set +f
      for entry; do
        # A command may have put thousands of files there: they must not cost the stop its time.
        listed=$((listed + 1))
        if [ "$((listed % 64))" = 0 ] && clock && [ "$((now - reading))" -gt "$((total / 4))" ]; then
          if [ "$owner" = "$me_uid" ]; then
            cannot_tell "more markers than can be read, after $listed"
          else
            note "uid $owner has more markers of this turn than can be read"
          fi
          return
        fi
        # shellcheck disable=SC2086
        read_marker "$place" "$owner" $entry
      done
    done
  done
}

# What the markers said, where an earlier sweep proved the turn and its reply was lost.
read_tombstone() {
  if [ "$remembered" = 1 ] || [ "$scope" != - ] || [ ! -f "$1" ] || [ -L "$1" ] || [ ! -O "$1" ]; then return 0; fi
  # shellcheck disable=SC2094  # nothing is written here
  while read -r part; do
    # shellcheck disable=SC2086  # split on purpose: checked below to be numbers and words
    set -- $part
    if [ "$1" = m ] && [ $# = 7 ] && is_number "$2" && is_number "$3"; then
      case $4$5 in -- | *[0-9]) ;; *) continue ;; esac
      case $4$5 in *[!0-9-]*) continue ;; esac
      case $6$7 in [01]run | [01]refused | [01]pending | [01]invalid) ;; *) continue ;; esac
      [ "$6$7" != 0run ] || unbranded=1
      remembered=1
      markers="$markers$part$nl"
    fi
  done <"$1"
}

own_namespace() {
  namespace=-
  while read -r key value; do
    [ "$key" = ino: ] && namespace=i$value
  done 2>/dev/null 3</proc/self/ns/pid </proc/self/fdinfo/3
  if [ "$namespace" = - ] && look 1; then namespace=s$start; fi
}

strange_marker() {
  strange=$((strange + 1))
  if [ "$strange" -le 5 ]; then note "the marker of command $number $1"; else note 'more such markers'; fi
}

# PLACE OWNER and the fields of one line of ls -ln.
read_marker() {
  place=$1 owner=$2
  shift 2
  [ $# -ge 9 ] || return 0
  shape=$1 file_owner=$3 size=$5
  shift $(($# - 1))
  number=$1
  case $number in '' | 0* | *[!0-9]* | ??????????*) return 0 ;; esac
  if [ "$scope" != - ] && [ "$number" != "$scope" ]; then return 0; fi
  # A command has one marker. The control's own uid is read first: no other uid may contradict it.
  case $mine in *" $number "*) return 0 ;; esac
  [ "$owner" != "$me_uid" ] || mine="$mine$number "
  outcome=invalid mpid=- mstart=- mbrand=- ok=0
  case $shape in -*) [ "$file_owner" = "$owner" ] && [ "$size" -le 200 ] && ok=1 ;; esac
  if [ "$ok" = 1 ]; then
    version='' said=''
    {
      read -r version mpid mstart mboot mspace mbrand rest
      read -r said
    } 2>/dev/null <"$place/$number"
    if [ "$version" = fence1 ] && is_pid "$mpid" && is_number "$mstart"; then
      case $said in
      '') outcome=run ;;
      refused) outcome=refused ;;
      esac
    elif [ -z "$version" ]; then
      # Between open and write; such a start has its tombstone test still before it.
      outcome=pending mpid=- mstart=-
    fi
    [ "$outcome" != invalid ] || mpid=- mstart=-
  fi
  has_brand=0
  case $outcome in
  invalid) strange_marker 'is not one of ours' ;;
  *)
    case $mbrand in
    "$(((1000000 + 0x${turn%"${turn#??????}"}) * 1000 + number % 1000))") has_brand=1 ;;
    -) [ "$mpid" = - ] || unbranded=1 ;;
    *) strange_marker "bears a brand that is not this turn's" ;;
    esac
    if [ "$mpid" != - ] && { [ "$has_brand" = 1 ] || [ "$mbrand" = - ]; }; then believe; fi
    ;;
  esac
  markers="${markers}m $number $owner $mpid $mstart $has_brand $outcome$nl"
}

believe() {
  if [ "$mspace" != "$namespace" ] && [ "$mspace" != - ] && [ "$namespace" != - ]; then
    # The preamble refuses such a command, so another uid's marker that says it is made up.
    if [ "$owner" = "$me_uid" ]; then
      cannot_tell "command $number runs in another pid namespace than the control run"
    else
      note "uid $owner claims a command $number in another pid namespace"
    fi
    return
  fi
  if [ "$mboot" != "$boot" ]; then
    note "command $number was started before the last boot"
    return
  fi
  case $skip in *" $mpid "*) return ;; esac
  # Found by its own marks already, as nearly all are.
  eval "k=\${i_$mpid:-0}"
  if [ "$k" != 0 ]; then
    eval "begun=\$s_$k"
    [ "$begun" != "$mstart" ] || return
  fi
  look "$mpid"
  case $? in
  1) return ;;
  2)
    [ "$owner" != "$me_uid" ] || cannot_tell "process $mpid of command $number cannot be read"
    return
    ;;
  esac
  [ "$start" = "$mstart" ] || return
  case $state in Z | X) all_dead "$mpid" && return ;; esac
  before=$start
  status "$mpid"
  [ "$uid" = "$owner" ] || return
  if [ "$has_brand" = 1 ]; then
    limit_of "$mpid"
    [ "$limit" = "$mbrand" ] || return
  fi
  look "$mpid" || return
  [ "$start" = "$before" ] || return
  evidence=marker command=$number problem=-
  record "$mpid"
}

is_number() {
  case $1 in '' | *[!0-9]* | ????????????????????*) return 1 ;; esac
}

is_pid() {
  case $1 in '' | 0* | 1 | *[!0-9]* | ????????*) return 1 ;; esac
}

# The last pid of this namespace, from the last field of /proc/loadavg.
newest() {
  last=
  read -r one two three four last 2>/dev/null </proc/loadavg
  is_number "$last" || last=0
}

# Looks at the pids that were given out since the last look, the newest first: they are the ones
# that live. Stops those of the turn on sight; counts in `unseen` those that came and went.
chase() {
  # A pid is given out a moment before its process is in the table: who was missing gets a second look.
  missing=$waiting waiting=''
  for next in $missing; do
    if [ -e "/proc/$next" ]; then catch "$next"; else unseen=$((unseen + 1)); fi
  done
  newest
  next=$last
  if [ "$last" -lt "$mark_pid" ]; then
    # Wrapped around: what was given out at the top of the range is left to the scan.
    unseen=$((unseen + 1))
    mark_pid=300
    [ "$last" -ge 300 ] || mark_pid=$last
  fi
  looks=16
  while [ "$next" -gt "$mark_pid" ]; do
    case "$own$skip" in
    *" $next "*) ;;
    *)
      looks=$((looks - 1))
      if [ "$looks" -lt 0 ]; then
        unseen=$((unseen + 1))
        break
      fi
      if [ -e "/proc/$next" ]; then catch "$next"; else waiting="$waiting $next"; fi
      ;;
    esac
    next=$((next - 1))
  done
  mark_pid=$last
}

# Stops a pid of the turn the moment its mark was read, then makes sure of it: two builtins lie
# between the mark and the signal, and a number is not given out again within microseconds.
catch() {
  if [ "$unbranded" = 0 ]; then
    limit_of "$1"
    # shellcheck disable=SC2254
    case $limit in $brands) ;; *) return 0 ;; esac
  else
    marked "$1" chase || return 0
  fi
  kill -STOP "$1" 2>/dev/null || return 0
  look "$1"
  case $? in
  1) return 0 ;;
  2)
    kill -CONT "$1" 2>/dev/null
    cannot_tell "process $1 bears a mark of the turn and cannot be read"
    return 0
    ;;
  esac
  case $state in Z | X) all_dead "$1" && return 0 ;; esac
  before=$start
  if marked "$1" chase && look "$1" && [ "$start" = "$before" ]; then
    record "$1"
    caught=$((caught + 1))
    eval "g_$k=\"\${g_$k:+\$g_$k,}STOP@$(((now - begin) * 10))\" w_$k=kill"
  else
    kill -CONT "$1" 2>/dev/null
  fi
}

# STOP all of them, look for what they forked meanwhile, KILL all: no parent restarts what dies.
kill_all() {
  for k in $1; do send STOP; done
  scan
  clock
  for k in $1; do
    send KILL
    eval "w_$k=killed d_$k=$now h_$k=\${h_$k:-$now}"
  done
}

# Walks every live record one step up its own ladder: SIGINT, SIGTERM (and SIGCONT where stopped),
# SIGKILL. No grace for the deaf: who ignores the signal, or has it pending after 50 ms.
step() {
  doomed=
  for k in $live; do
    judge
    [ "$verdict" = alive ] || continue
    eval "rung=\$w_$k since=\$f_$k problem=\$x_$k"
    age=$((now - since))
    case $problem in other-turn | ancestor | init) continue ;; esac
    case $rung in
    new)
      if helps; then
        :
      elif [ "$((now - begin))" -gt "$late" ]; then
        doomed="$doomed $k"
      else
        send INT
        eval "w_$k=int f_$k=$now"
      fi
      ;;
    int)
      if [ "$age" -ge "$int_grace" ] || deaf "$pid" int; then
        send TERM
        # After TERM, never before: a stopped process must not run on in between.
        case $state in T | t) send CONT ;; esac
        eval "w_$k=term f_$k=$now"
      fi
      ;;
    term)
      if [ "$age" -ge "$term_grace" ] || deaf "$pid" term; then doomed="$doomed $k"; fi
      ;;
    kill) doomed="$doomed $k" ;;
    killed)
      # What forked between STOP and KILL, or a KILL that was not permitted: again, at most each 50 ms.
      eval "since=\$d_$k"
      if [ "$((now - since))" -ge 5 ]; then
        send KILL
        eval "d_$k=$now"
      fi
      ;;
    esac
  done
  [ -z "$doomed" ] || kill_all "$doomed"
}

# Started by a process of the turn after that one had its signal: this is how it answers, and a
# signal now would break a handler that puts things in order. It has its starter's grace, no own.
helps() {
  above=$ppid
  for generation in 1 2 3 4 5 6 7 8; do
    eval "above=\${i_$above:-0}"
    [ "$above" != 0 ] || return 1
    eval "rung=\$w_$above since=\$f_$above see=\$l_$above"
    [ "$see" = alive ] || return 1
    case $rung in
    int) [ "$start" -ge "$since" ] && [ "$((now - since))" -lt "$int_grace" ] && return 0 ;;
    term) [ "$start" -ge "$since" ] && [ "$((now - since))" -lt "$term_grace" ] && return 0 ;;
    esac
    [ "$rung" = new ] || return 1
    eval "above=\$a_$above"
  done
  return 1
}

deaf() {
  [ "$age" -ge 1 ] || return 1
  status "$1"
  eval "u_$k=\$uid"
  if [ "$2" = int ]; then
    holds_int "$ignored" && return 0
    [ "$age" -ge 5 ] && { holds_int "$pending" || holds_int "$shared"; }
  else
    holds_term "$ignored" && return 0
    [ "$age" -ge 5 ] && { holds_term "$pending" || holds_term "$shared"; }
  fi
}

# Only those are left that no signal of ours will end: not permitted, not ours to judge, or in the
# kernel for a second after SIGKILL.
stuck() {
  for k in $live; do
    eval "rung=\$w_$k problem=\$x_$k see=\$l_$k first_kill=\${h_$k:-$now}"
    case $problem in EPERM | other-turn | ancestor | init) continue ;; esac
    [ "$see" != unknown ] || continue
    [ "$rung" = killed ] && [ "$((now - first_kill))" -gt 100 ] && continue
    return 1
  done
  return 0
}

# --- here it begins -----------------------------------------------------------------------------

printf 'fence-sweep 1 %s %s\n' "$turn" "$run"
if ! clock || ! look "$$"; then
  printf 'n no readable /proc: nothing can be looked at\n'
  printf 'end unknown group sampled 0 0 0\n'
  exit 76
fi
begin=$now late=$((int_grace + term_grace + 5))
namespace=- boot=-

# Never the sweep itself, its ancestors, pid 1.
skip=" $$ 1 " parent=$ppid
while [ "$parent" -gt 1 ] 2>/dev/null; do
  skip="$skip$parent "
  look "$parent" || break
  parent=$ppid
done

newest
mark_pid=$last first_pid=$last
own=' '
grep=0
if command -v grep >/dev/null 2>&1; then grep=1; else note 'no grep: each process was looked at by itself'; fi
[ -r "/proc/$$/limits" ] || unbranded=1
if ! read -r text 2>/dev/null </proc/1/stat; then containment='own-uid'; fi

# STEP tombstone, in every directory that a command of this turn may look at.
directories='' buried=0 again=0 remembered=0
status "$$"
me_uid=$uid
for candidate in /tmp/.fence /var/tmp/.fence /dev/shm/.fence "/tmp/.fence-$me_uid"; do
  if [ "$mode" = stop ] && [ "$buried" = 0 ] && [ ! -e "$candidate" ] && [ ! -L "$candidate" ]; then
    mkdir -m 1777 "$candidate" 2>/dev/null
  fi
  closed="$candidate is not as it was: a start that is under way may not see the tombstone"
  if [ ! -d "$candidate" ] || [ -L "$candidate" ]; then
    [ ! -d "$candidate/$me_uid/$turn" ] || cannot_tell "$closed"
    continue
  fi
  if [ ! -O "$candidate" ]; then
    # shellcheck disable=SC2012,SC2046
    set -- $(ls -nd "$candidate" 2>/dev/null)
    [ "${3-}" = 0 ] || continue
  elif [ "$mode" = stop ] && { [ ! -w "$candidate" ] || [ ! -x "$candidate" ]; }; then
    # Closed by a command: what is behind it would be back with the next chmod.
    chmod 1777 "$candidate" 2>/dev/null
  fi
  directories="$directories $candidate"
  [ "$mode" = stop ] || continue
  if [ ! -w "$candidate" ]; then
    # Where nothing can be written, no command of ours could write its marker either.
    [ ! -w "$candidate/$me_uid/$turn" ] || cannot_tell "$closed"
    continue
  fi
  stone=$candidate/$turn.cancelled
  [ "$scope" = - ] || stone=$candidate/$turn.$scope.cancelled
  # Removed first: what lies there may be another uid's, or a link that leads elsewhere.
  if [ -L "$stone" ]; then rm -f "$stone" 2>/dev/null; fi
  [ ! -e "$stone" ] || again=1
  [ -e "$stone" ] || echo fence1 2>/dev/null >"$stone"
  if [ -e "$stone" ]; then buried=1; else cannot_tell "the tombstone cannot be written in $candidate"; fi
done
if [ "$mode" = stop ] && [ "$buried" = 0 ]; then
  cannot_tell 'the tombstone cannot be written'
fi

# STEP scan
scan
# A slow first scan is not the time of those that it found.
clock
late=$((now - begin + late))
if [ "$unbranded" = 1 ]; then
  [ "$containment" = own-uid ] || containment=lineage-unbranded
fi

windows=0
if [ "$mode" = stop ]; then
  rescan=$now quiet=0
  while :; do
    clock
    if [ "$((now - begin))" -ge "$total" ]; then
      [ -z "$live" ] || note 'out of time'
      [ "$quiet" = 1 ] || doubt=1
      break
    fi
    if [ -n "$live" ]; then
      # STEP escalate
      quiet=0
      step
      look_again
      [ -n "$live" ] || continue
      if stuck; then break; fi
      pause 0.01
      clock
      if [ "$((now - rescan))" -ge 5 ]; then
        scan
        rescan=$now
      fi
      continue
    fi
    # STEP prove: an empty scan, an empty window of 30 ms, an empty scan, and no new pid unlooked-at.
    windows=$((windows + 1))
    newest
    mark_pid=$last own=' ' waiting='' caught=0 unseen=0
    scan || [ -n "$live" ] && continue
    clock
    # 30 ms, and longer where pids came and went unseen the time before.
    until=$((now + 3 * windows))
    chases=0
    while [ "$caught" = 0 ] && { [ "$now" -lt "$until" ] || [ "$chases" -lt 20 ]; }; do
      chases=$((chases + 1))
      chase
      clock
    done
    [ "$caught" = 0 ] || continue
    scan || [ -n "$live" ] && continue
    chase
    chase
    [ "$caught" = 0 ] || continue
    quiet=1
    newest
    if [ "$last" = 0 ] || [ "$last" = "$first_pid" ]; then
      note 'the kernel tells no last pid: sampled'
      [ "$windows" -ge 3 ] && break
      continue
    fi
    if [ "$unseen" = 0 ]; then
      snapshot=consistent
      break
    fi
    [ "$windows" -ge 3 ] && break
  done
fi

thaw

clock
verdict=clear
for k in $live; do
  eval "see=\$l_$k problem=\$x_$k"
  case $see in
  alive) [ "$problem" = other-turn ] && doubt=1 || verdict=alive ;;
  unknown) doubt=1 ;;
  esac
done
if [ "$verdict" = clear ] && [ "$doubt" = 1 ]; then verdict=unknown; fi

# What is proved needs its markers no more. The tombstone stays.
if [ "$verdict" = clear ] && [ "$mode" = stop ] && [ "$scope" = - ]; then
  for directory in $directories; do
    stone=$directory/$turn.cancelled
    if [ "$remembered" = 0 ] && [ -f "$stone" ] && [ ! -L "$stone" ] && [ -O "$stone" ]; then
      printf '%s' "$markers" 2>/dev/null >>"$stone"
    fi
    for place in "$directory"/[0-9]*/"$turn"; do
      if [ -d "$place" ] && [ ! -L "$place" ]; then rm -rf "$place" 2>/dev/null; fi
    done
    for stone in "$directory/$turn".*.cancelled; do
      if [ -e "$stone" ]; then rm -f "$stone" 2>/dev/null; fi
    done
  done
fi

k=0
while [ "$k" -lt "$count" ]; do
  k=$((k + 1))
  eval "printf 'p %s %s %s %s %s %s %s %s %s %s %s %s %s %s\n' \"\$p_$k\" \"\$s_$k\" \"\$a_$k\" \"\$b_$k\" \"\$c_$k\"" \
    "\"\$u_$k\" \"\$n_$k\" \"\$e_$k\" \"\$l_$k\" \"\$t_$k\" \"\${g_$k:--}\" \"\$z_$k\" \"\$x_$k\" \"\$m_$k\""
done
printf '%s%s' "$markers" "$notes"
printf 'end %s %s %s %s %s %s\n' "$verdict" "$containment" "$snapshot" "$scans" "$unseen" \
  "$(((now - begin) * 10))"
case $verdict in
clear) exit 0 ;;
alive) exit 75 ;;
*) exit 76 ;;
esac
