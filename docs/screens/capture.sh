#!/usr/bin/env bash
# Records the pictures in this folder: types each command into a terminal (tmux) and saves the screen as SVG.
#
#     cargo build --release && docs/screens/capture.sh
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
bin=$(cd "$here/../../target/release" && pwd)
work=$(mktemp -d)
session=lockstep-screens-$$
trap 'tmux kill-session -t "$session" 2>/dev/null || true; rm -rf "$work"' EXIT

# capture NAME COLUMNS SECONDS COMMAND [ROWS]: the screen after the command has ended, or after so many seconds.
capture() {
    local name=$1 columns=$2 seconds=$3 command=$4 rows=${5:-60}
    tmux new-session -d -s "$session" -x "$columns" -y "$rows" -c "$work" \
        "env PATH=$bin:$PATH XDG_CACHE_HOME=$work/.cache HF_HOME=.cache/huggingface PS1='$ ' TERM=tmux-256color bash --norc --noprofile"
    sleep 1
    # The mark ends a command; it is removed from the picture.
    tmux send-keys -t "$session" "clear; $command; tput setaf 0; echo '[ended]'" Enter
    local waited=0
    until tmux capture-pane -p -t "$session" | grep -q '^\[ended\]' || ((waited++ >= seconds)); do sleep 1; done
    {
        printf '\033[1m$ %s\033[0m\n' "$command"
        tmux capture-pane -e -p -t "$session" | sed '/\[ended\]/,$d; /; tput setaf 0; echo/d'
    } | python3 "$here/terminal_svg.py" --title "$command" >"$here/$name.svg"
    tmux kill-session -t "$session"
    echo "$name.svg"
}

capture quickstart 104 300 "lockstep quickstart"
capture train 104 12 "lockstep train outputs/quickstart/quickstart.yaml output_dir=outputs/second max_steps=2000"
# Two ranks train in the background while a terminal watches them.
(cd "$work" && PATH=$bin:$PATH XDG_CACHE_HOME=$work/.cache exec lockstep train outputs/quickstart/quickstart.yaml \
    output_dir=outputs/second overwrite_output_dir=true max_steps=2000 --nproc 2 threads=1 >/dev/null 2>&1) &
trainer=$!
until [[ -s $work/outputs/second/metrics.jsonl ]]; do sleep 1; done
capture watch 104 40 "lockstep watch outputs/second" 40
kill "$trainer"
wait "$trainer" || true

capture plan 104 30 "lockstep plan model=7b vocab_size=32000 strategy=zero3 mixed_precision=bf16 device=cuda --nproc 8"
capture doctor 104 30 "lockstep doctor"
capture generate 104 30 "lockstep generate outputs/quickstart -p '27+45=' -p 'the red fox sees the old owl. whom?'"
