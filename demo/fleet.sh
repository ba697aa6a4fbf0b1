#!/bin/sh
# A fleet of four nodes on this machine: CHILDREN children (200) with one account of the
# model; a node is killed, its children are placed again, and nothing is left. Each step
# runs the real command and checks the result; the first failure ends it.
set -eu
exec </dev/null  # no step asks on a terminal

here=$(cd "$(dirname "$0")" && pwd)
repo=$(cd "$here/.." && pwd)
PATH="$repo/.venv/bin:$PATH"
export PATH

children=${CHILDREN:-200}
patience=200

step() { printf '\n== %s\n' "$1"; }
say() { printf '   %s\n' "$1"; }
show() { sed 's/^/     /'; }
fail() { printf 'fleet demo: %s\n' "$1" >&2; exit 1; }
python -c 'import ray' 2>/dev/null || fail "cannot run: Ray is missing; make install"

work=$(mktemp -d /tmp/fl-XXXXXX)  # short, for Ray's sockets are in there
started=
finish() {
  for pid in $started; do kill -9 "$pid" 2>/dev/null || true; done
  # `down` has ended Ray where all went well.
  for state in "$work"/?/state/fleet; do
    [ ! -d "$state" ] || python -m supervisor.cluster.ray_processes "$state" || true
  done
  rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
HOME=$work SANDHOST_STATE=$work/state
export HOME SANDHOST_STATE
sandhost doctor --leaks --json > "$work/before" || true
key=sk-demo-0123456789
(umask 077; echo "$key" > "$work/key")

# Runs a command of the fleet on a node.
fleet() {
  at=$1 command=$2
  shift 2
  sandhost fleet "$command" --control "$work/$at/run/control" "$@"
}

# Prints the value of a Python expression of a JSON text x, which is on stdin.
value() { python -c "import json, sys; x = json.load(sys.stdin); print($1)"; }
count() { fleet a ps --json | value "sum(1 for c in x['children'] if $1)"; }

# Asks again and again until a command succeeds.
await() {
  end=$(($(date +%s) + patience))
  until "$@"; do
    [ "$(date +%s)" -lt "$end" ] || fail "not so within $patience s: $*"
    sleep 0.3
  done
}
are() { [ "$(count "$2")" -eq "$1" ]; }
is_up() { fleet a ps --json | value "{n['name']: n['state'] for n in x['nodes']}['$1']" | grep -qx up; }
asked() { grep -c '"event": "request"' "$work/asked" || true; }
were_asked() { [ "$(asked)" -ge "$1" ]; }
spent() { fleet c quota --json | value "x['accounts'][0]['spent']"; }
is_spent() { [ "$(spent)" = "$1.0" ]; }

nothing_runs() { ! pgrep -f "$work/" > /dev/null; }

start_daemon() {
  sandhost serve --config "$work/$1/config.toml" 2>> "$work/$1/log" &
  eval "daemon_$1=$!"
  started="$started $!"
  await sandhost ps --control "$work/$1/run/control" > /dev/null 2>&1
}

step "1. Four daemons, and a stand-in for a model's provider"
mkfifo "$work/url"
(cd "$repo" && exec python -m demo.provider --key "$key" --log "$work/asked" > "$work/url") &
started=$!
read -r url < "$work/url"
for node in a b c d; do
  mkdir -p "$work/$node"
  cat > "$work/$node/config.toml" <<END
[host]
runtime_dir = "$work/$node/run"
state_dir = "$work/$node/state"
max_children = $children
[llm]
base_url = "$url"
api_key_file = "$work/key"
max_tokens = 20
[llm.quota]
weights = { output = 1.0 }
[fleet]
lease = "12s"
[fleet.quota]
max_tokens = 1000000
window = "never"
END
  start_daemon $node
done
say "sandhost serve, with a section [fleet], four times"

step "2. One begins the fleet, the others join it; Ray listens on the loopback alone"
port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
fleet a up --node a --port "$port" --json > "$work/up"
address=$(value 'x["address"]' < "$work/up")
token=$(value 'x["token_file"]' < "$work/up")
for node in b c d; do
  fleet $node join --node $node --address "$address" --token-file "$token"
done
fleet a ps | show
for node in a b c d; do is_up $node || fail "node $node is not up"; done

step "3. $children children; each asks the model once, and waits"
say "sandhost fleet run -- sandhost llm chat -p hello --json"
fleet b run -- sandhost llm chat -p hello --json > "$work/answer"
show < "$work/answer"
tokens=$(value 'x["usage"]["total_tokens"]' < "$work/answer")
say "sandhost fleet spawn -n $children --name job --restart on-failure -- ..."
# Each asks in the words of FD 3: that takes a shell, and no interpreter.
fleet a spawn -n "$children" --name job --restart on-failure -- sh -c '
  printf "LLM_CHAT false 0 0 5 0\nhello" >&3
  read -r said <&3
  case $said in OK*) exec sleep 3600 ;; *) echo "$said"; exit 1 ;; esac' > "$work/names"
[ "$(wc -l < "$work/names")" -eq "$children" ] || fail "not all were started"
await were_asked "$((1 + children))"
# A call that is under way at the kill would count as its worst case.
await is_spent "$(((1 + children) * tokens))"
await are "$children" 'c["state"] == "running"'
fleet a ps --json | value '"\n".join("%s has %d" % (n["name"], sum(c["node"] == n["name"] for c in x["children"] if c["state"] == "running")) for n in x["nodes"])' | show

step "4. kill -9 of a node's daemon; its children are placed again"
lost=$(count 'c["node"] == "d" and c["state"] == "running"')
kill -9 "$daemon_d"
await are "$lost" 'c["state"] == "running" and c["incarnation"] == 2 and c["node"] != "d"'
calls=$((1 + children + lost))
await were_asked "$calls"
await are "$children" 'c["state"] == "running"'
say "$lost children of d run on the other nodes, in their second life; d is lost"
start_daemon d
await is_up d
say "its daemon is started again: it is a node again, with none of its children"
are 0 'c["node"] == "d" and c["state"] == "running"' || fail "d has children"

step "5. One account for all nodes"
await is_spent "$((calls * tokens))"
fleet c quota | show
say "$calls calls of $tokens tokens; none is missing, and none counts twice"

step "6. The end"
fleet b down
for node in a b c d; do
  eval "kill \$daemon_$node; wait \$daemon_$node" || fail "the daemon of $node failed"
done
for pid in $started; do kill "$pid" 2>/dev/null || true; done
started=
await nothing_runs  # other nodes end their Ray when they have answered
sandhost doctor --leaks --json > "$work/after" || true
python "$here/nothing_left.py" "$work/before" "$work/after"
say "done"
