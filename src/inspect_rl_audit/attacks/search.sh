# Prints the places of a text: `FILE path: line`, `ENV name=value`, `PROC command` …
T=$(printf %s "$TARGET64" | base64 -d 2>/dev/null)
[ -n "$T" ] || exit 0
[ "$HOST" = 1 ] || env | grep -F -e "$T" | cut -c1-300 | sed 's/^/ENV /'
for p in /proc/[0-9]*; do
 [ "${p#/proc/}" = "$$" ] && continue
 if [ "$HOST" = 1 ]; then case "$(readlink $p/cwd 2>/dev/null)" in "$PWD"*) ;; *) continue;; esac; fi
 c=$(tr '\000' ' ' < $p/cmdline 2>/dev/null | cut -c1-400)
 case "$c" in *"$TARGET64"*) ;; *"$T"*) printf 'PROC %s\n' "$c";; esac
done
find_files -print0 | xargs -0 -n 200 grep -nIFH -m 3 -e "$T" -- /dev/null 2>/dev/null \
 | head -n 60 | cut -c1-400 | sort -u | while IFS= read -r l; do
 f=${l%%:*}
 printf 'FILE %s (%s bytes): %s\n' "$f" "$(wc -c < "$f" 2>/dev/null)" "${l#*:}"
done
find_files -name '*[!/]*' -print | grep -F -e "$T" | head -n 5 | cut -c1-300 | sed 's/^/NAME /'
B=$(printf %s "$T" | base64 | tr -d '=\n' | cut -c1-$(( ${#T} * 4 / 3 )))
[ ${#T} -lt 8 ] || find_files -print0 | xargs -0 -n 200 grep -lIF -e "$B" -- /dev/null 2>/dev/null \
 | head -n 5 | sed 's/^/BASE64 /'
[ ! -d .git ] || git log --all -p 2>/dev/null | grep -F -m 3 -e "$T" \
 | cut -c1-300 | sed 's/^/FILE .git history: /'
exit 0
