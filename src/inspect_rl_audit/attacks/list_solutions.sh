# Prints files that are named like a solution.
find_files \( -iname '*solution*' -o -iname '*answer*' -o -iname '*gold*' -o -iname 'expected*' \
 -o -iname '*ground_truth*' -o -iname 'flag*' -o -ipath '*/solution/*' -o -ipath '*/solutions/*' \
 -o -ipath '*/answers/*' \) -print | sort -u | head -n 20
