#!/usr/bin/env bash
# install.sh VENV: Horovod 0.28.1, built against the torch of VENV (4 minutes of CPU; its wheel is kept beside VENV).
# Its CMake asks for C++14, which torch's headers are not: a wrapper of the compiler asks for C++20 instead.
set -euo pipefail
venv=$1
python="$venv/bin/python"
wheels="$(dirname "$venv")/wheels"
pip() { "$python" -m pip -q --disable-pip-version-check --no-input "$@"; }
pip install numpy psutil cloudpickle pyyaml packaging cffi wheel "setuptools<81"
mpi=0
# mpicxx is there without the headers, too.
if command -v mpirun >/dev/null && echo '#include <mpi.h>' | mpicxx -E -x c++ - >/dev/null 2>&1; then mpi=1; fi
kind="$("$python" -c 'import sys, torch; print(f"{sys.version_info[0]}{sys.version_info[1]}-{torch.__version__}")')-mpi$mpi"
if ! ls "$wheels/$kind"/horovod-*.whl >/dev/null 2>&1; then
    command -v cmake >/dev/null || pip install cmake
    export PATH="$venv/bin:$PATH"
    mkdir -p "$wheels/$kind"
    cat >"$venv/bin/cxx20" <<'WRAPPER'
#!/usr/bin/env bash
given=()
for argument in "$@"; do
    case "$argument" in
    -std=c++1[147] | -std=gnu++1[147]) given+=(-std=c++20) ;;
    -g) ;;
    -O3) given+=(-O1) ;;
    *) given+=("$argument") ;;
    esac
done
exec g++ -w "${given[@]}"
WRAPPER
    chmod +x "$venv/bin/cxx20"
    settings=(HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1)
    if [ $mpi = 1 ]; then settings+=(HOROVOD_WITH_MPI=1); else settings+=(HOROVOD_WITHOUT_MPI=1); fi
    env "${settings[@]}" CXX="$venv/bin/cxx20" MAKEFLAGS=-j2 \
        "$python" -m pip -q --disable-pip-version-check --no-cache-dir wheel --no-build-isolation --no-deps -w "$wheels/$kind" horovod==0.28.1
fi
pip install --no-deps "$wheels/$kind"/horovod-*.whl
