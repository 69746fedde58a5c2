#!/bin/sh
# environment.sh serving|dev: makes .venv from lock files with hashes, or brings it up to date.
#
# serving is what a user needs; dev adds the developers' tools. The lock file of dev has every package of serving in the
# same version, so that going from one to the other adds packages and changes none: a server that runs from .venv is not
# disturbed. A stamp is a copy of what was installed. Only binary packages are installed: no compiler is needed.
set -eu
cd "${0%/*}/.."
locks=deploy/locks
venv=.venv
pip="$venv/bin/python -m pip --disable-pip-version-check --no-input --quiet"

serving() { cat $locks/serving.txt $locks/build.txt; }
dev() { cat $locks/dev.txt; }
project() { cat pyproject.toml services/version.py; }
done_with() { "$1" | cmp -s - "$venv/.$1"; }
stamp() { "$1" > "$venv/.$1.new" && mv "$venv/.$1.new" "$venv/.$1"; }

# Prints the first of these that is new enough and can make environments; PYTHON=/path/to/python overrules.
find_python() {
    without=
    for python in ${PYTHON:-} python3.14 python3.13 python3.12 python3.11 python3; do
        if command -v "$python" > /dev/null 2>&1 \
            && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
            if "$python" -c 'import ensurepip, venv' 2> /dev/null; then echo "$python"; return; fi
            without=$python
        fi
    done
    if [ -n "$without" ]; then
        echo "$without cannot make environments: install its venv module (Debian, Ubuntu: apt install python3-venv)" >&2
    else
        echo "Millstream needs Python 3.11 or newer, found: $(python3 --version 2> /dev/null || echo none)." >&2
        echo "Install one, or name it: make PYTHON=/path/to/python3.11" >&2
    fi
    return 1
}

make_environment() {
    python=$(find_python)
    echo "Making the environment in $venv with $("$python" --version); this takes about a minute, once."
    "$python" -m venv --clear $venv
}

bring_up_to_date() {
    done_with "$1" && return
    # Without a stamp it is not there, or was left unfinished.
    [ -e $venv/.serving ] || make_environment
    case $1 in
        serving) $pip install --require-hashes --only-binary :all: -r $locks/serving.txt -r $locks/build.txt ;;
        dev)
            echo "Adding the developers' tools to $venv; this takes about a minute, once."
            # It has all of serving, which need not be installed first.
            $pip install --require-hashes --only-binary :all: -r $locks/dev.txt
            stamp serving
            ;;
    esac
    stamp "$1"
}

# Two at once would install into each other's files.
if command -v flock > /dev/null; then
    mkdir -p build
    exec 9> build/.environment
    flock 9
fi
bring_up_to_date "$1"
if ! done_with project; then
    $pip install --no-deps --no-build-isolation --editable .
    stamp project
fi
