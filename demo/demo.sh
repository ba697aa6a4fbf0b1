#!/bin/sh
# What a host does, shown on this repository's own files. Each step says what it shows,
# runs the real command, and checks the result; the first failure ends the demo.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
repo=$(cd "$here/.." && pwd)
PATH="$repo/.venv/bin:$PATH"
export PATH
work=$(mktemp -d)
provider=
trap '[ -z "$provider" ] || kill "$provider" 2>/dev/null; rm -rf "$work"' EXIT
root=$work/root
journal=$work/journal
control=$work/control
mkdir "$root" "$work/tmp"
TMPDIR=$work/tmp
export TMPDIR
sandhost doctor --leaks --json > "$work/before" || true

step() { printf '\n== %s\n' "$1"; }
say() { printf '   %s\n' "$1"; }
fail() { printf 'demo: %s\n' "$1" >&2; exit 1; }

step "1. A shell child counts the words of README.md through FD 3"
say "It may read the repository and write into its private root; it opens no file itself."
sandhost run --root "$root" --read "$repo" --journal "$journal" -- sh -c '
  words=$(sandhost fs cat "$1/README.md" | wc -w)
  printf "README.md has %d words\n" "$words" | sandhost fs put words.txt
  sandhost fs cat words.txt' sh "$repo" | sed 's/^/   child: /'
expected=$(wc -w < "$repo/README.md")
grep -qx "README.md has $expected words" "$root/words.txt" || fail "the count is wrong"
say "the host counts $expected as well: the same"

step "2. What it was not granted, it does not get"
if sandhost run --root "$root" --log-level error -- sandhost fs cat /etc/passwd 2>"$work/denied"
then fail "a child read /etc/passwd"; fi
sed 's/^/   child: /' "$work/denied"

step "3. A Python child writes a report about the sources"
sandhost run --root "$root" --read "$repo" --journal "$journal" \
  --pass-env PYTHONPATH --env "PYTHONPATH=$repo" -- python3 "$here/report.py" "$repo"
sed 's/^/   /' "$root/report.md"

step "4. A nested child behind a proxy, narrowed to one directory"
mkdir "$root/shared"
echo "for the nested child" > "$root/shared/note.txt"
sandhost run --root "$root" --journal "$journal" --log-level error -- \
  sandhost relay --read shared -- sh -c '
    sandhost fs cat shared/note.txt
    sandhost fs cat words.txt || echo "words.txt: refused, as it should be"' 2>&1 |
  sed 's/^/   nested: /'

step "5. kill -9 in the middle of a 10 MiB WRITE"
say "A child sends half of its payload and kills itself; its file must show none of it."
say "(No walls around this one: it asks the host for its tables by itself.)"
status=0
sandhost run --root "$root" --journal "$journal" --control "$control" --sandbox none -- \
  sh "$here/torn.sh" "$control" "$work/tables" || status=$?
say "exit status $status: 128 + 9"
[ "$status" -eq 137 ] || fail "the child did not die by SIGKILL"
size=$(wc -c < "$root/torn.bin")
say "torn.bin holds $size bytes: what was acknowledged before, and nothing of the rest"
[ "$size" -eq 6 ] || fail "half a WRITE is in the file"
say "the host's tables a moment before:"
sed 's/^/     /' "$work/tables"

step "6. A model, behind the host's key and quota (THE MODEL IS A STAND-IN)"
say "demo/provider.py speaks the provider's HTTP on loopback; no model, no network is used."
key=sk-demo-0123456789
mkfifo "$work/url"
(cd "$repo" && exec python -m demo.provider --key "$key" > "$work/url") &
provider=$!
read -r url < "$work/url"
(umask 077; echo "$key" > "$work/key")
cat > "$work/llm.toml" <<END
[llm]
base_url = "$url"
api_key_file = "$work/key"
max_tokens = 20
[llm.quota]
max_tokens = 150
END
sandhost run --config "$work/llm.toml" --root "$root" --journal "$journal" \
  --log-level error -- sh -c '
  sandhost llm chat -p "How many words are here?" -i words.txt -o answer.txt
  sandhost fs cat answer.txt; echo
  sandhost llm chat -p "Read this." -i /etc/passwd || echo "refused, as it should be"
  while sandhost llm chat -p "and again" > /dev/null; do sandhost llm quota; done
  env' > "$work/llm" 2>&1
kill "$provider"; provider=
grep -v = "$work/llm" | sed 's/^/   child: /'
grep -q "^The message has" "$root/answer.txt" || fail "the answer is not in the file"
grep -q "quota exceeded" "$work/llm" || fail "the quota did not hold"
if cat "$work/llm" "$journal" | grep -q "$key"; then fail "the key shows"; fi
say "the key is in nothing that the child saw, and not in the journal"

step "7. The journal: what happened, in order"
tail -n 7 "$journal" | cut -c1-150 | sed 's/^/   /'
opened=$(grep -c '"file.opened"' "$journal")
closed=$(grep -c '"file.closed"\|"file.auto_closed"' "$journal")
say "$opened files were opened, $closed were closed, one of them for a dead child"
[ "$opened" -eq "$closed" ] || fail "a file was never closed"

step "8. Nothing is left"
sandhost doctor --leaks --json > "$work/after" || true
python3 "$here/nothing_left.py" "$work/before" "$work/after"
say "done"
