#!/usr/bin/env bash
# Installs the wheel into a fresh virtual environment and runs what it installed.
#
#     tools/try-wheel.sh
#
# Needs Python 3 and, for maturin, the network: that is why `.ci/run` does not do it.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --disable-pip-version-check .
lockstep=$work/venv/bin/lockstep

# From another folder, so that nothing of the checkout is used.
cd "$work"
"$lockstep" --version
echo '{"text": "one row"}' >data.jsonl
"$lockstep" plan model=tiny train_files=data.jsonl max_length=64 device=cpu output_dir=out
"$lockstep" train model=tiny train_files=data.jsonl max_length=64 max_steps=2 device=cpu threads=2 output_dir=out
venv/bin/pip show --files lockstep-lm
ls -l "$lockstep"
cmp "$lockstep" "$OLDPWD/target/release/lockstep" 2>/dev/null && echo "the same bytes as target/release/lockstep" ||
    echo "not the bytes of $OLDPWD/target/release/lockstep, if there is one"
