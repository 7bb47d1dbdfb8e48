#!/usr/bin/env bash
# Builds the release archive of this machine's target and the file with its debug information.
#
#     tools/dist.sh OUT [OLDEST_GLIBC]
#
# leaves in OUT: lockstep-VERSION-TARGET.tar.gz (the binary, both licences, the README) and
# lockstep-VERSION-TARGET.debug.gz. Unpacked beside the binary as `lockstep.debug`, the second file gives backtraces and
# debuggers their line numbers. With OLDEST_GLIBC (such as 2.28) the script fails if the binary needs a newer one.
# UNTESTED=yes adds `-untested` to both names and a file that says so to the archive.
set -euo pipefail
out=$(mkdir -p "${1:?the folder for the archive}" && realpath "$1")
oldest_glibc=${2:-}
cd "$(dirname "$0")/.."

cargo build --profile dist --locked -p lockstep
built=$(cargo metadata --no-deps --offline --format-version 1 |
    sed 's/.*"target_directory":"\([^"]*\)".*/\1/')/dist/lockstep
version=$("$built" --version | awk '{ print $2 }')
target=$(rustc -vV | awk '/^host:/ { print $2 }')

# Symbol versions look like `GLIBC_2.28`; the highest one is the oldest glibc that can load the binary.
needed=$(objdump -T "$built" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -n 1)
echo "needs ${needed/_/ }"
if [[ -n $oldest_glibc ]] &&
    [[ $(printf '%s\n' "$needed" "GLIBC_$oldest_glibc" | sort -V | tail -n 1) != "GLIBC_$oldest_glibc" ]]; then
    echo "error: the binary needs ${needed/_/ }, newer than $oldest_glibc; build where glibc is $oldest_glibc" >&2
    exit 1
fi

name=lockstep-$version-$target${UNTESTED:+-untested}
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
mkdir "$work/$name"
objcopy --only-keep-debug "$built" "$work/lockstep.debug"
# The name that the binary looks for, in its own folder.
(cd "$work" && objcopy --strip-all --add-gnu-debuglink=lockstep.debug "$built" "$name/lockstep")
cp LICENSE-MIT LICENSE-APACHE README.md "$work/$name/"
if [[ -n ${UNTESTED:-} ]]; then
    echo "Untested: this binary was built for $target, but no test has run on that target." >"$work/$name/UNTESTED"
fi
tar -C "$work" --owner=0 --group=0 --sort=name -czf "$out/$name.tar.gz" "$name"
gzip -c "$work/lockstep.debug" >"$out/$name.debug.gz"
(cd "$out" && ls -l "$name.tar.gz" "$name.debug.gz")
ls -l "$work/$name/lockstep"
