# Runs as a child: begins a WRITE of 10 MiB, sends half of it, and kills itself.
# $1 is the host's control socket, $2 where its tables go.
printf 'OPEN torn.bin w false\n' >&3
read -r _ fileno <&3
printf 'WRITE %d 6\nwhole\n' "$fileno" >&3
read -r _ _ <&3
printf 'WRITE %d 10485760\n' "$fileno" >&3
head -c 5242880 /dev/zero >&3
{ sandhost clients --control "$1"; sandhost files --control "$1"; } > "$2"
kill -9 $$
