#!/bin/sh
# run.sh PROGRAM...: runs test programs that speak TAP, prints what failed and what was skipped, and closes with one
# line "N passed, N failed, N skipped". Fails when a test fails, a program crashes, or nothing passed.
export CMOCKA_MESSAGE_OUTPUT=TAP
export OMP_WAIT_POLICY=passive # many small calls from many threads: spinning teams would starve each other
out=$(mktemp) || exit 1
trap 'rm -f "$out"' EXIT
for program in "$@"; do
    "$program" > "$out.1" 2>&1
    status=$?
    echo "@program $program $status" >> "$out"
    cat "$out.1" >> "$out"
    rm -f "$out.1"
done
echo "@program end 0" >> "$out"
awk '
function close_program() {
    if (program == "") return
    ran = ok + bad + skip
    if (status != 0 && bad == 0 || ran != planned || planned == 0) {
        bad++
        print "FAILED   " program ": exit status " status " after " ran " of " planned " tests"
    }
    if (bad) for (i = 0; i < lines; i++) print "    " line[i]
    passed_all += ok; failed_all += bad; skipped_all += skip
}
/^@program / { close_program(); program = $2; status = $3; ok = bad = skip = planned = lines = 0; next }
/^1\.\.[0-9]+/ { planned += substr($1, 4); next }
/^(not )?ok [0-9]+ # SKIP/ { skip++; sub(/.*# SKIP */, ""); print "skipped  " $0; next }
/^ok [0-9]+/ { ok++; next }
/^not ok [0-9]+/ { bad++; sub(/^not ok [0-9]+ (- )?/, ""); print "FAILED   " $0; next }
/^(not )?# (not )?ok|^# ok/ { next }
{ if (lines < 60) line[lines++] = $0 }
END {
    print passed_all + 0 " passed, " failed_all + 0 " failed, " skipped_all + 0 " skipped"
    exit failed_all > 0 || passed_all + 0 == 0
}' "$out"
