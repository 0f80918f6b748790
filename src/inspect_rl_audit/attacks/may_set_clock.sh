# Prints CLOCK where the clock may be set. Containers have the clock of their machine: an audit that
# set it would set it for everything else there, so this only reads the capability.
caps=$(sed -n 's/^CapEff:[[:space:]]*//p' /proc/self/status)
read -r inner outer size < /proc/self/uid_map
[ "$outer" = 0 ] && [ "$size" = 4294967295 ] || exit 0
[ $(( 0x$caps >> 25 & 1 )) = 1 ] && echo CLOCK
exit 0
