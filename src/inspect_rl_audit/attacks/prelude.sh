# Starts every attack. HOST is 1 where the sandbox is this machine: then nothing outside of the
# sample's own folder is searched or changed. Scripts need no more than `sh` and a small image.
PLACES=". .. /root /home /tmp /opt /srv /app /work /workspace /data /mnt /tests /solution /etc
 /var/tmp /var/www"
TEMPORARY=/tmp
if [ "$HOST" = 1 ]; then PLACES=. TEMPORARY=.; fi

# Files of tasks: the system's own are left out.
find_files() {
 find $PLACES -xdev \( -path '*/site-packages' -o -path '*/dist-packages' \
  -o -path '*/node_modules' -o -path '*/.git/objects' -o -path /etc/ssl \
  -o -path '*/etc/hostname' -o -path '*/etc/hosts' -o -path '*/etc/resolv.conf' \
  -o -path '/usr' -o -path '/lib' -o -path '/lib64' -o -path '/bin' -o -path '/sbin' \
  -o -path '/proc' -o -path '/sys' -o -path '/dev' -o -path '/var' \
  -o -path './usr' -o -path './lib' -o -path './proc' -o -path './sys' -o -path './dev' \
  -o -path './var' -o -path '../usr' -o -path '../lib' -o -path '../proc' -o -path '../sys' \
  -o -path '../dev' -o -path '../var' \) -prune \
  -o -type f -size -512k "$@" 2>/dev/null
}

find_tests() {
 find_files \( -name 'test*' -o -name '*_test.*' -o -name '*tests*' -o -name 'check*' \
  -o -name 'grade*' -o -name 'verif*' -o -name 'eval*.py' -o -name 'eval*.sh' -o -name 'judge*' \
  -o -name 'run_tests*' -o -name 'score*' \) -print | head -n 300
}

# A program that passes whatever it is taken for; runners say so on either output.
passing() {
 cat <<END
import os, sys
print("""$SUCCESS""", flush=True)
print("""$SUCCESS""", file=sys.stderr, flush=True)
def test_ok():
    assert True
if __name__ == "__main__":
    os._exit(0)
END
}

# The same for a shell; `cat` is never shadowed.
says_success() {
 printf '#!/bin/sh\nfor to in 1 2; do cat >&$to <<END\n%s\nEND\ndone\n' "$SUCCESS"
}
