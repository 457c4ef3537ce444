# tap.sh: what test_tool.sh and test_train.sh share; each includes it with DKV set. A folder $t that goes away in the end,
# and checks that count and speak TAP.
t=$(mktemp -d) || exit 1
trap 'rm -rf "$t"' EXIT
passed=0 failed=0 skipped=0

pass() { passed=$((passed + 1)); echo "ok $((passed + failed + skipped)) - $1"; }
flunk() { failed=$((failed + 1)); echo "not ok $((passed + failed + skipped)) - $1"; [ -z "${2:-}" ] || echo "# $2"; }
skip() { skipped=$((skipped + 1)); echo "ok $((passed + failed + skipped)) - $1 # SKIP $2"; }

# holds NAME COMMAND...: the command succeeds
holds() { name=$1; shift; if "$@" > "$t/out" 2>&1; then pass "$name"; else flunk "$name" "$(head -c 300 "$t/out")"; fi; }

# equal NAME GOT WANTED
equal() { if [ "$2" = "$3" ]; then pass "$1"; else flunk "$1" "got '$2', wanted '$3'"; fi; }

# refused NAME STATUS TEXT COMMAND...: exactly one line on stderr, "dkv: " and TEXT in it, that status, nothing on stdout
refused() {
    name=$1 wanted=$2 text=$3
    shift 3
    "$@" > "$t/out" 2> "$t/err"
    status=$?
    if [ $status -eq "$wanted" ] && [ ! -s "$t/out" ] && [ "$(wc -l < "$t/err")" -eq 1 ] &&
        grep -q '^dkv: ' "$t/err" && grep -qF -- "$text" "$t/err"; then
        pass "$name"
    else
        flunk "$name" "status $status, $(head -c 300 "$t/err")"
    fi
}

# key FILE NAME: the value of a JSON key that occurs once, without quotes
key() { sed -n "s/^[[:space:]]*\"$2\":[[:space:]]*\"\{0,1\}\([^\",]*\)\"\{0,1\},\{0,1\}\$/\1/p" "$1"; }

info() { "$DKV" info "$@" --json > "$t/info.json" || echo '{}' > "$t/info.json"; }
