#!/bin/sh
# A child that writes records and comes to an end: $1 the file, $2 its mode, $3 the end,
# $4 a number of bytes that the end cuts at, then the records: files named N.SIZE. All
# but the last are written whole, each with its reply; what the last one is for, the end
# says.
name=$1 mode=$2 end=$3 cut=$4
shift 4

written() { # one whole WRITE
  printf 'WRITE %s %s\n' "$n" "${1##*.}" >&3
  cat "$1" >&3
  read -r ok rest <&3
}
torn() { # a WRITE of which $cut bytes come
  printf 'WRITE %s %s\n' "$n" "${1##*.}" >&3
  head -c "$cut" "$1" >&3
}
opened() {
  printf 'OPEN %s %s false\n' "$1" "$2" >&3
  read -r ok n <&3
}

opened "$name" "$mode"
while [ $# -gt 1 ]; do
  written "$1"
  shift
done
case $end in
torn) torn "$1" ;;
header) printf 'WRITE %s' "$n" >&3 ;;
between) ;;
reading)
  opened big r
  printf 'READ %s 16777216\n' "$n" >&3
  head -c "$cut" <&3 >/dev/null
  ;;
unread)
  opened big r
  printf 'READ %s 16777216\nREAD %s 16777216\n' "$n" "$n" >&3
  torn "$1"
  ;;
pipelined)
  for again in 1 2 3; do
    printf 'WRITE %s %s\n' "$n" "${1##*.}" >&3
    cat "$1" >&3
  done
  torn "$1"
  ;;
session)
  setsid sleep 1000 &
  torn "$1"
  ;;
daemon)
  (setsid sh -c '(sleep 1000 &)' &)
  torn "$1"
  ;;
heir) # a daemon goes on writing whole records where its ancestor left
  (setsid sh -c "while :; do printf 'WRITE $n ${1##*.}\n'; cat '$1'; done >&3" &)
  while :; do read -r ok rest <&3 || exit; done
  ;;
busy) while :; do written "$1"; done ;;
closed)
  written "$1"
  printf 'CLOSE %s\n' "$n" >&3
  read -r ok <&3
  exit 0
  ;;
esac
kill -9 $$
