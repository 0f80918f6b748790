# The executor: process 1 of a container, a POSIX shell that takes one request a line from
# the engine's attached input and runs it in a session of its own. It needs no program of
# the image but setsid and env, and forks nothing for itself: nothing of it can be killed, since
# the kernel drops every signal that process 1 has no handler for, and nothing of it can be
# read, since the shell's file is executable but not readable, which makes the kernel
# refuse /proc/1/fd, /proc/1/mem and ptrace to processes of the same user.
#
# Output is the command's own, straight to the engine's pipes, between a begin and an end
# mark that carry a number nobody in the container has seen. Those pipes are safe to share
# only while no process of an earlier command lives: otherwise the answer is "busy" and the
# caller uses an exec of the engine.

nl='
'

# Fields of /proc/PID/stat from the state on. A command name may hold anything, even new
# lines and brackets: only what follows the last bracket counts.
_stat() {
  _s=
  { while IFS= read -r _t || [ -n "$_t" ]; do _s=$_t; done <"/proc/$1/stat"; } 2>/dev/null
  case $_s in *') '*) _s=${_s##*) } ;; *) return 1 ;; esac
}

# Is every other process gone? A zombie counts as gone when no thread of it runs on.
_alone() {
  _me=
  for _d in /proc/[0-9]*; do
    _p=${_d#/proc/}
    if [ "$_p" = 1 ]; then _me=1; continue; fi
    if _stat "$_p"; then
      set -- $_s
      case $1 in [ZX]) [ "${18}" -le 1 ] && continue ;; esac
      return 1
    elif [ -d "$_d" ]; then
      return 1
    fi
  done
  [ -n "$_me" ]
}

# Kill session P and all descendants of its members; freeze first, so that none escapes
# by forking meanwhile.
_tree() {
  _k=" $P " _more=1
  while [ -n "$_more" ]; do
    _more=
    for _d in /proc/[0-9]*; do
      _p=${_d#/proc/}
      case " 1 $$ $_k" in *" $_p "*) continue ;; esac
      _stat "$_p" || continue
      set -- $_s
      if [ "$4" != "$P" ]; then
        case $_k in *" $2 "*) ;; *) continue ;; esac
      fi
      kill -s STOP "$_p" 2>/dev/null
      _k="$_k$_p " _more=1
    done
  done
  kill -s KILL -- "-$P" 2>/dev/null
  for _p in $_k; do kill -s KILL "$_p" 2>/dev/null; done
  :
}
