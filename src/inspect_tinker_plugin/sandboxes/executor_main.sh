# In a child of the executor: become the command. N mark, C folder, E environment, B a job
# of the shell itself in place of a command.
_job() {
  cd -- "$C" || exit 127
  unset OLDPWD
  eval "$E"
  if [ -n "$B" ]; then eval "$B"; exit; fi
  case $1 in
    */*)
      if [ ! -e "$1" ]; then
        printf 'exec: "%s": no such file or directory\n' "$1" >&2; exit 127
      elif [ -d "$1" ] || [ ! -x "$1" ]; then
        printf '\036d%s\n' "$N"; printf 'exec: "%s": permission denied\n' "$1" >&2; exit 126
      fi ;;
    *)
      command -v -- "$1" >/dev/null 2>&1 || {
        printf 'exec: "%s": executable file not found in $PATH\n' "$1" >&2; exit 127; } ;;
  esac
  # The shell made this child, as any in the background, ignore INT and QUIT.
  exec "$V" --default-signal=INT,QUIT "$W" "$@"
}

# Run a request. The caller stops it through signals to process 1, which have handlers only
# while a command runs: TERM asks its group to end, USR1 kills its tree, USR2 kills all.
_run() {
  printf '\036b%s\n' "$N"; printf '\036b%s\n' "$N" >&2
  S=busy
  _alone || return 0
  S= H=
  trap 'H=1; kill -s TERM -- "-$P" 2>/dev/null' TERM
  trap 'H=1; _tree' USR1
  trap 'H=1; kill -s KILL -- -1 2>/dev/null' USR2
  if [ -n "$I" ]; then printf '%b' "$I" | _job "$@" & else _job "$@" </dev/null & fi
  P=$!
  while :; do
    H=
    wait "$P" 2>/dev/null; _r=$?
    # A wait that a signal cut short is repeated; one that had just ended is not known twice.
    if [ -z "$H" ]; then
      [ -n "$S" ] && [ "$_r" = 127 ] || S=$_r
      break
    fi
    S=$_r
  done
  trap - TERM USR1 USR2
  Q=$P P=0
}

trap '' INT QUIT
IFS= read -r K || exit
W=$(command -v setsid)
V=$(command -v env)
"$V" --default-signal=INT true 2>/dev/null || W=
if [ "$$" = 1 ] && ! ( : </proc/1/fd/0 ) 2>/dev/null; then X=closed; else X=exposed; fi
printf '\036h%s %s %s\n' "$K" "$X" "${W:--}"

Q=0 KEEP=
while IFS= read -r L; do
  # A request is whole or it is nothing.
  case $L in "$K "*" #$K") ;; *) continue ;; esac
  N= C=/ E= I= B= P=0 S=failed
  command eval "${L#"$K "}"
  trap - TERM USR1 USR2
  printf '\036e%s %s\n' "$N" "${S:-failed}"; printf '\036e%s %s\n' "$N" "${S:-failed}" >&2
done
while [ -n "$KEEP" ]; do sleep 3600 & wait; done
