#!/usr/bin/env bash
# Memory accesses, and races on shared memory, of all kernels on two virtual ranks: tests/cuda/sanitize.sh [tool...]
# The exit code is 0 if every tool ends with right results and nothing to report.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export PATH=$PATH:/usr/local/cuda/bin
# Instrumented kernels are 10 to 100 times slower, and so is what they wait for.
export NBEP_TIMEOUT_MS=${NBEP_TIMEOUT_MS:-60000}
status=0
for tool in "${@:-memcheck racecheck}"; do
    for name in $tool; do
        echo "=== $name"
        # torch asks the driver for much that is not there, so calls of the API are not reported.
        compute-sanitizer --tool "$name" --error-exitcode 9 --launch-timeout 120 --report-api-errors no \
            "${PYTHON:-python3}" tests/cuda/sanitize_main.py || status=1
    done
done
exit $status
