#!/bin/bash
# Installs every Debian package the project needs; the only place that names them. Asks for root only if one is missing.
set -euo pipefail

packages=(
    ca-certificates    # pip's TLS
    clang              # builds the kernel programs, and again on a node where they don't fit
    ethtool            # tests give veth pairs the offloads of a NIC
    iproute2           # tests look at listening sockets and make network namespaces
    libbpf-dev         # headers of the kernel programs
    libbpf1            # loads them
    libgomp1           # scikit-learn, onnxruntime
    libpython3.11      # Triton's Python backend links to it
    linux-libc-dev     # headers of the kernel programs
    make
    openssl            # tests make certificates
    python3
    python3-bpfcc      # tracing tools (modalmesh bpf trace)
    python3-venv
    redis-server       # the cache's tests start their own
)

missing=()
for package in "${packages[@]}"; do
    status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$status" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ]; then
    echo "error: these Debian packages are missing: ${missing[*]}" >&2
    echo "       run as root, or: sudo apt-get install ${missing[*]}" >&2
    exit 1
fi
echo "Installing Debian packages: ${missing[*]} ..."
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install --yes --no-install-recommends "${missing[@]}" >/dev/null
