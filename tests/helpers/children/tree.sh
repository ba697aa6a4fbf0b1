#!/bin/sh
# A child that grows a tree which is hard to find: $1 is a unique number of seconds.
# Grandchildren in sessions of their own, daemons by double fork, one with an empty
# environment, one stopped; all of them hold FD 3. Says "grown" on FD 3 by an OPEN.
setsid sleep "$1" &
(setsid sh -c "sleep $1" &)
(trap '' TERM HUP INT; env -i /bin/sleep "$1" &)
(sh -c 'kill -STOP $$'; true) &
(while :; do (sleep "$1" & exec sleep 0.01); done) &
printf 'OPEN grown w false\n' >&3
read -r reply <&3
while :; do
  printf 'WRITE 1000 4\nabcd' >&3
  read -r reply <&3 || exec sleep "$1"
done
