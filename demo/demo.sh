#!/bin/sh
# What a host is for, on a small git repository, and what stands behind it. Each step says
# what it shows, runs the real command, and checks the result; the first failure ends it.
set -eu
exec </dev/null  # no step asks on a terminal

here=$(cd "$(dirname "$0")" && pwd)
repo=$(cd "$here/.." && pwd)
PATH="$repo/.venv/bin:$PATH"
export PATH

step() { printf '\n== %s\n' "$1"; }
say() { printf '   %s\n' "$1"; }
show() { sed 's/^/     /'; }
fail() { printf 'demo: %s\n' "$1" >&2; exit 1; }
command -v git >/dev/null || fail "cannot run the demo: git is missing; install it"

work=$(mktemp -d)
provider=
trap '[ -z "$provider" ] || kill "$provider" 2>/dev/null; rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
root=$work/root
journal=$work/journal
control=$work/control
project=$work/project
mkdir "$root" "$work/tmp"
# Nothing of the reader's own settings: not of git, nor of where workspaces are kept.
HOME=$work TMPDIR=$work/tmp SANDHOST_STATE=$work/state PAGER=cat
GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
export HOME TMPDIR SANDHOST_STATE PAGER GIT_CONFIG_GLOBAL GIT_CONFIG_NOSYSTEM
sandhost doctor --leaks --json > "$work/before" || true

key=sk-demo-0123456789
(umask 077; echo "$key" > "$work/key")

# Starts the stand-in for a model's provider; its arguments are those of demo.provider.
ask_stand_in() {
  rm -f "$work/url"
  mkfifo "$work/url"
  (cd "$repo" && exec python -m demo.provider --key "$key" "$@" > "$work/url") &
  provider=$!
  read -r url < "$work/url"
}

# Runs the project's checks where the operator is: in the base.
check_base() { (cd "$project" && python3 -B -m unittest checks 2>&1 | tail -n 1); }

step "1. A repository with a failing check, and a coding agent"
mkdir "$project"
cat > "$project/basket.py" <<'END'
def total_cents(prices, discount_percent=0):
    """Return what is to be paid."""
    return sum(prices) * (100 + discount_percent) // 100
END
cat > "$project/checks.py" <<'END'
from unittest import TestCase

from basket import total_cents


class Total(TestCase):
    def test_a_discount_makes_it_cheaper(self):
        self.assertEqual(total_cents([1500, 500], 10), 1800)
END
cat > "$project/CHANGES.md" <<'END'
# Changes

- 1.0: baskets have a total.
END
git -C "$project" init -q -b main
git -C "$project" add .
git -C "$project" -c user.name=You -c user.email=you@localhost commit -qm "A basket"
git -C "$project" log --oneline | show
say "its checks: $(check_base)"
[ "$(check_base)" = "FAILED (failures=1)" ] || fail "the checks do not fail"
say "demo/agent.py is a plain program: openai, subprocess, open(). It knows of no host."
say "THE MODEL IS A STAND-IN: demo/provider gives the answers of demo/answers.json."

step "2. sandhost run --workspace . -- agent.py TASK"
ask_stand_in --script "$here/answers.json"
cat > "$work/agent.toml" <<END
[llm]
base_url = "$url"
api_key_file = "$work/key"
endpoint = true
[llm.quota]
max_tokens = 100000
END
status=0
(cd "$project" && sandhost run --config "$work/agent.toml" --workspace . \
  --workspace-name demo --journal "$journal" -- \
  "$here/agent.py" "Find out why the check fails, and mend it.") \
  > "$work/agent" 2>&1 || status=$?
kill "$provider"; provider=
show < "$work/agent"

if [ "$status" -eq 125 ]; then
  say "This machine gives no workspace for the reason above; what follows needs none."
else
[ "$status" -eq 0 ] || fail "the agent failed"
grep -q "discount makes it cheaper" "$work/agent" || fail "the agent did not commit"

step "3. What it changed lies apart; the repository is as it was"
say "sandhost workspace diff demo basket.py CHANGES.md"
sandhost workspace diff demo basket.py CHANGES.md > "$work/patch" || [ $? -eq 1 ]
show < "$work/patch"
grep -q '^+.*100 - discount' "$work/patch" || fail "the edit is not in the patch"
git -C "$project" diff --quiet || fail "the base was written to"
say "the checks here still say: $(check_base)"
[ "$(check_base)" = "FAILED (failures=1)" ] || fail "the base was written to"

step "4. You changed a file as well: a conflict, and nothing is overwritten"
echo "- 1.0.1: a line of yours." >> "$project/CHANGES.md"
say "sandhost workspace commit demo"
status=0
sandhost workspace commit demo > "$work/commit" || status=$?
show < "$work/commit"
[ "$status" -eq 1 ] || fail "a conflict was not told"
[ "$(check_base)" = "FAILED (failures=1)" ] || fail "a part was committed"

step "5. Take one file, drop the rest"
say "sandhost workspace commit demo --only basket.py"
sandhost workspace commit demo --only basket.py | show
say "the checks here: $(check_base)"
[ "$(check_base)" = OK ] || fail "the commit did not bring the file"
git -C "$project" status --short | show
for place in "$SANDHOST_STATE" "$journal" "$work/agent"; do
  if grep -rq "$key" "$place"; then fail "the key shows in $place"; fi
done
say "sandhost workspace discard demo --yes"
sandhost workspace discard demo --yes
grep -q "a line of yours" "$project/CHANGES.md" || fail "your line is gone"
[ "$(git -C "$project" log --oneline | wc -l)" -eq 1 ] || fail "the rest was not dropped"
[ "$(sandhost workspace list --json)" = "[]" ] || fail "a workspace is left"
say "no workspace is left, and the key was in none of this"
fi

step "6. Programs that do know of the host: files through FD 3, and no others"
sandhost run --root "$root" --read "$repo" --journal "$journal" -- sh -c '
  words=$(sandhost fs cat "$1/README.md" | wc -w)
  printf "README.md has %d words\n" "$words" | sandhost fs put words.txt
  sandhost fs cat words.txt' sh "$repo" | show
grep -qx "README.md has $(wc -w < "$repo/README.md") words" "$root/words.txt" ||
  fail "the count is wrong"
if sandhost run --root "$root" --log-level error -- \
  sandhost relay -- sandhost fs cat /etc/passwd 2>"$work/denied"
then fail "a child read /etc/passwd"; fi
show < "$work/denied"

step "7. kill -9 in the middle of a 10 MiB WRITE"
say "A child sends half of its payload and kills itself; its file must show none of it."
say "(No walls around this one: it asks the host for its tables by itself.)"
status=0
sandhost run --root "$root" --journal "$journal" --control "$control" --sandbox none -- \
  sh "$here/torn.sh" "$control" "$work/tables" || status=$?
[ "$status" -eq 137 ] || fail "the child did not die by SIGKILL"
size=$(wc -c < "$root/torn.bin")
say "exit status 137; torn.bin has $size bytes, which were acknowledged before"
[ "$size" -eq 6 ] || fail "half a WRITE is in the file"

step "8. A quota that holds"
ask_stand_in
cat > "$work/llm.toml" <<END
[llm]
base_url = "$url"
api_key_file = "$work/key"
max_tokens = 20
[llm.quota]
max_tokens = 100
END
sandhost run --config "$work/llm.toml" --root "$root" --journal "$journal" \
  --log-level error -- sh -c '
  sandhost llm chat -p "How many words are here?" -i words.txt
  while sandhost llm chat -p "and again" > /dev/null; do sandhost llm quota; done
  env' > "$work/llm" 2>&1
kill "$provider"; provider=
grep -v = "$work/llm" | show
grep -q "quota exceeded" "$work/llm" || fail "the quota did not hold"
if cat "$work/llm" "$journal" | grep -q "$key"; then fail "the key shows"; fi

step "9. Nothing is left"
opened=$(grep -c '"file.opened"' "$journal")
closed=$(grep -c '"file.closed"\|"file.auto_closed"' "$journal")
say "the journal: $opened files opened, $closed closed, one of them for a dead child"
[ "$opened" -eq "$closed" ] || fail "a file was never closed"
sandhost doctor --leaks --json > "$work/after" || true
python3 "$here/nothing_left.py" "$work/before" "$work/after"
say "done"
