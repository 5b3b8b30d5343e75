#!/usr/bin/env bash
# Runs Python with this checkout under an emulated aarch64; the first call brings what it needs into FOLDER.
#
#     scripts/aarch64.sh FOLDER -m genserve verify answer.json --model-repository models
#
# For Debian, with the packages qemu-user-static and python3, and with pip and ziglang for PYTHON (.venv/bin/python).
set -euo pipefail
checkout=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1" && folder=$(cd "$1" && pwd)
shift
root=$folder/root site=$folder/site package=$folder/package
python=${PYTHON:-$checkout/.venv/bin/python}

if [ ! -e "$site/done" ]; then
    # An apt of its own, so that the system gets no second architecture.
    mkdir -p "$folder"/apt/{lists,archives}/partial "$root/proc"
    touch "$folder/apt/status"
    apt=(-o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o Dir::State::lists="$folder/apt/lists"
        -o Dir::State::status="$folder/apt/status" -o Dir::Cache::archives="$folder/apt/archives"
        -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache=)
    apt-get "${apt[@]}" -q update
    apt-get "${apt[@]}" -q -y --no-install-recommends --download-only install python3 libstdc++6
    for package_file in "$folder"/apt/archives/*.deb; do dpkg -x "$package_file" "$root"; done
    # ONNX Runtime's cpuinfo crashes when it reads that of x86.
    for processor in $(seq 0 $(($(nproc) - 1))); do
        printf 'processor\t: %s\nFeatures\t: fp asimd asimddp\nCPU implementer\t: 0x41\n' "$processor"
        printf 'CPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n\n'
    done > "$root/proc/cpuinfo"
    version=$(basename "$(readlink "$root/usr/bin/python3")")
    platforms=()
    for glibc in 17 24 26 27 28 31 34 35 36; do platforms+=(--platform "manylinux_2_${glibc}_aarch64"); done
    "$python" -c 'import sys, tomllib
print(*tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"], sep="\n")' \
        "$checkout/pyproject.toml" > "$folder/requirements.txt"
    "$python" -m pip install -q --target "$site" "${platforms[@]}" --platform manylinux2014_aarch64 \
        --python-version "${version#python}" --only-binary=:all: -r "$folder/requirements.txt" \
        -c "$checkout/constraints.txt"
    touch "$site/done"
fi

rm -rf "$package" && mkdir -p "$package"
cp -r "$checkout/genserve" "$package/"
rm -rf "$package/genserve/kernels/lib"
sources=("$checkout"/genserve/kernels/{src,build.py}) built=$folder/kernels.built
if [ ! -e "$built" ] || [ -n "$(find "${sources[@]}" -newer "$built")" ]; then
    touch "$built.begun"
    "$python" -c 'import platform, sys
platform.machine = lambda: "aarch64"
sys.path.insert(0, sys.argv[1])
import build, pathlib
build.build(pathlib.Path(sys.argv[2]))' "$checkout/genserve/kernels" "$folder/kernels"
    mv "$built.begun" "$built"
fi
cp -r "$folder/kernels" "$package/genserve/kernels/lib"

# The programs that genserve starts are this one again.
cat > "$folder/python" << END
#!/usr/bin/env bash
export PYTHONSAFEPATH=1 PYTHONPATH=$package:$site PYTHONHOME=$root/usr
exec qemu-aarch64-static -0 $folder/python -L $root $root/usr/bin/python3 "\$@"
END
chmod +x "$folder/python"
exec "$folder/python" "$@"
