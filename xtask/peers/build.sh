#!/usr/bin/env bash
# Builds Linux's page tables, its allocator of IOVAs, its bounce pool, its DMA API, its container and its
# registered buffers in user space: ./build.sh WORKDIR VERSION [bytes | contention], where shim/versions
# has VERSION, such as 6.12, and WORKDIR is for that version alone
#
# Leaves WORKDIR/linux/version, the version of Linux, and WORKDIR/BUILD/io_pgtable, generic_pt, iova,
# swiotlb, swiotlb_copy, dma_lpae, dma_vtdss, container_lpae, container_vtdss and registered, where BUILD is u
# or k; a program that this Linux has no code for is not there, and WORKDIR/formats names the formats that
# are. With `bytes` it leaves WORKDIR/bytes/bytes alone, the server for comparing tables; with `contention`
# BUILD is c, for four CPUs.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$1"
work=$(cd "$1" && pwd)
version=$2
linux=$((${version%.*} * 100 + ${version#*.}))	# 612 for 6.12
tree=$work/linux

# u: as a program of user space; k: with the kernel's options for code that matter here; bytes: for
# a hardware that sees what was written back.
declare -A flags=(
	[u]="-O2"
	[c]="-O2"
	[bytes]="-O2 -DKSHIM_BYTES"
	[k]="-O2 -mgeneral-regs-only -fno-delete-null-pointer-checks -fno-allow-store-data-races -fomit-frame-pointer"
)

say() { echo "peers: $*" >&2; }
fail() { say "$*"; exit 1; }

tools=(gcc objcopy awk)
[ -e "$tree/uring/linux" ] || tools+=(apt-get apt-cache dpkg-deb tar xz bzip2)
missing=()
for tool in "${tools[@]}"; do
	command -v "$tool" >/dev/null || missing+=("$tool")
done
[ ${#missing[@]} = 0 ] || fail "needs ${missing[*]}; Debian and Ubuntu have them in the packages" \
	"apt, binutils, bzip2, dpkg, gawk, gcc, libc6-dev, tar and xz-utils"

# What is compiled, included or cut from; every other kernel header is an empty file.
members=(
	drivers/iommu/generic_pt
	drivers/iommu/{dma-iommu,iommu,iova,io-pgtable,io-pgtable-arm,io-pgtable-arm-v7s}.c
	drivers/iommu/{dma-iommu,iommu-pages,io-pgtable-arm}.h
	drivers/vfio/vfio_iommu_type1.c
	io_uring/{alloc_cache,memmap,rsrc}.c
	io_uring/{alloc_cache,filetable,register,rsrc}.h
	include/linux/generic_pt
	include/linux/{args,kconfig,list,poison,sizes,stringify}.h
	include/linux/{io-pgtable,iommu,iommu-helper,iova,iova_bitmap,swiotlb}.h
	include/linux/rbtree{,_augmented,_types}.h
	include/uapi/linux/{io_uring,iommu,iommufd,vfio}.h
	kernel/dma/swiotlb.c
	lib/{iov_iter,rbtree,xarray}.c
	lib/radix-tree.h
)

# Only the DMA API and its callers get these; they are in the tree's folder `dma`.
of_dma=(include/linux/{dma-direction,dma-mapping,iommu-dma,scatterlist}.h)

# What the container calls is cut out of these; they are in the tree's folder `vfio`.
of_vfio=(include/linux/{mm,mm_inline}.h)

# The ring alone gets these; they are in the tree's folder `uring`.
of_uring=(include/linux/{bvec,io_uring_types,uio,xarray}.h)

# The kernel source package of this version that the suites have which this machine's apt has, and on
# Debian those of its other releases on the same mirror. apt gets lists and a cache of its own and runs no
# hooks: the machine's are not touched. It checks the package by the digest that the suite signs.
fetch() {
	local apt=$work/apt key=/usr/share/keyrings/debian-archive-keyring.gpg
	local mirror known suite package archive member

	rm -rf "$apt" "$tree.part"
	mkdir -p "$apt"/{lists,cache/archives}/partial "$apt/sources" "$tree.part"
	cp /etc/apt/sources.list.d/* "$apt/sources" 2>/dev/null || true
	mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Component: main' |
		grep -m 1 '/debian/$') || true
	known=$(apt-get indextargets --format '$(RELEASE)' 'Created-By: Packages')
	for suite in bullseye bookworm trixie trixie-backports sid; do
		[ -z "$mirror" ] || [ ! -e $key ] || grep -qx "$suite" <<<"$known" ||
			echo "deb [signed-by=$key] $mirror $suite main" >>"$apt/sources/peers.list"
	done
	cat >"$apt/conf" <<-END
		#clear APT::Update;
		Dir::Etc::sourceparts "$apt/sources";
		Dir::State::lists "$apt/lists";
		Dir::Cache "$apt/cache";
		Acquire::Languages "none";
		APT::Sandbox::User "$(id -un)";
	END

	# A suite that does not answer is no reason to stop: another one may have the package.
	apt-get -qq -c "$apt/conf" update >&2 || say "not all of apt's suites could be read"
	package=linux-source-$version
	say "fetching $package (about 150 MB)"
	(cd "$apt" && apt-get -qq -c "$apt/conf" download "$package" >&2) ||
		fail "$package could not be downloaded; is the network there, and does a suite of apt have it?"
	archive=$(echo "$apt/$package"_*.deb)
	member=$(dpkg-deb --fsys-tarfile "$archive" | tar -tv |
		awk '/^-.*\/usr\/src\/.*\.tar\.(xz|bz2)$/ { print $NF }')
	# Not every version has all members.
	members+=("${of_dma[@]}" "${of_vfio[@]}" "${of_uring[@]}")
	dpkg-deb --fsys-tarfile "$archive" | tar -xO "$member" | decompress "$member" |
		tar -x -C "$tree.part" --strip-components=1 "${members[@]/#/$package/}" 2>"$work/tar.log" ||
		[ -e "$tree.part/drivers/iommu/io-pgtable-arm.c" ] ||
		fail "$package is not as expected: $(tail -n 1 "$work/tar.log")"
	set_apart dma "${of_dma[@]}"
	set_apart vfio "${of_vfio[@]}"
	set_apart uring "${of_uring[@]}"
	dpkg-deb -f "$archive" Version >"$tree.part/version"
	rm -rf "$apt" "$tree"
	mv "$tree.part" "$tree"
}

# set_apart FOLDER FILE...: where only those find them who ask for the folder
set_apart() {
	local folder=$tree.part/$1/linux file
	shift

	mkdir -p "$folder"
	for file in "$@"; do
		[ ! -e "$tree.part/$file" ] || mv "$tree.part/$file" "$folder"
	done
}

decompress() {
	case $1 in
	*.xz) xz -dc -T0 ;;
	*.bz2) bzip2 -dc ;;
	esac
}

# Empty files for the kernel headers that neither the tree nor the host has: shim/kshim.h,
# included before everything, stands in for them.
stub_headers() {
	local header

	rm -rf "$work/stubs"
	(cd "$tree" && grep -rhoE '^#\s*include <[^>]+>' .) | sed 's/.*<\(.*\)>/\1/' | sort -u |
		while read -r header; do
			[ ! -e "$tree/include/$header" ] && [ ! -e "$here/shim/$header" ] || continue
			echo "#include <$header>" | gcc -E - >/dev/null 2>&1 && continue
			mkdir -p "$work/stubs/$(dirname "$header")"
			: >"$work/stubs/$header"
		done
}

# Whole functions of iommu.c: iommu_pgsize() to iommu_unmap_fast(), and what dma-iommu.c calls besides; and
# those of other files that the container and the ring call.
cut_core() {
	local file=$tree/drivers/iommu/iommu.c

	mkdir -p "$work/cut"
	sed -n -e '/^struct iommu_domain \*iommu_get_dma_domain(/,/^}/p' \
		-e '/^phys_addr_t iommu_iova_to_phys(/,/^}/p' "$file" >"$work/cut/iommu_dma.inc"
	sed -n '/^ssize_t iommu_map_sg(/,/^}/p' "$file" >"$work/cut/iommu_map_sg.inc"
	sed -n '/^static size_t iommu_pgsize(/,/^EXPORT_SYMBOL_GPL(iommu_unmap_fast)/p' \
		"$file" >"$work/cut/iommu_core.inc"
	# Where this Linux has it.
	cat "$tree"/vfio/linux/*.h 2>/dev/null |
		sed -n '/^static inline .*num_pages_contiguous(/,/^}/p' >"$work/cut/num_pages_contiguous.inc"
	sed -n '/^struct page \*\*io_pin_pages(/,/^}/p' "$tree/io_uring/memmap.c" \
		>"$work/cut/io_pin_pages.inc" 2>/dev/null || true
	sed -n '/^void iov_iter_bvec(/,/^}/p' "$tree/lib/iov_iter.c" >"$work/cut/iov_iter_bvec.inc"
	sed -n -e '/^enum iter_type {/,/^};/p' -e '/^struct iov_iter {/,/^};/p' "$tree/uring/linux/uio.h" \
		>"$work/cut/iov_iter.inc"
	grep -q '^EXPORT_SYMBOL_GPL(iommu_unmap_fast)' "$work/cut/iommu_core.inc" ||
		fail "iommu.c has no iommu_pgsize() to iommu_unmap_fast()"
}

# Functions start on a cache line, or results would hang on where the linker puts them.
common=(-std=gnu11 -D_GNU_SOURCE -fno-strict-aliasing -fno-common -fwrapv -falign-functions=64
	-Werror=implicit-function-declaration)
include=(-I"$here/shim" -I"$here/bench" -isystem "$work/cut" -isystem "$tree"
	-isystem "$tree/include" -isystem "$work/stubs" -include kshim.h)

# The container, and those who share its notion of a process.
vfio=(-DKSHIM_USER)

# The ring, likewise.
uring=(-DKSHIM_USER -DKSHIM_URING "-I$here/shim/uring" "-I$tree/uring")

# The DMA API: what no benchmark calls of it is left out by the linker.
dma=(-DKSHIM_DMA "-I$tree/dma" -ffunction-sections -Wl,--gc-sections)

# object BUILD FILE NAME [FLAG...]: one measured file; build k gets the kernel's memset and memcpy
object() {
	local build=$1 file=$2 out=$work/$1/$3.o
	shift 3

	# shellcheck disable=SC2086
	gcc "${common[@]}" "${include[@]}" ${flags[$build]} "$@" -c "$file" -o "$out" || return
	[ "$build" != k ] || objcopy --redefine-sym memset=kmemset --redefine-sym memcpy=kmemcpy "$out"
}

# The server for comparing tables.
build_bytes() {
	local b=bytes iommu=$tree/drivers/iommu fmt formats=(amdv1 vtdss x86_64 riscv64)

	for fmt in "${formats[@]}"; do
		[ -e "$iommu/generic_pt/fmt/iommu_$fmt.c" ] ||
			fail "Linux $(cat "$tree/version") has no generic_pt/fmt/iommu_$fmt.c: it can be timed," \
				"not compared; remove $tree for a newer one"
	done
	mkdir -p "$work/$b"
	# shellcheck disable=SC2086
	gcc -O2 -Wall "${common[@]}" "${include[@]}" ${flags[$b]} -c "$here/shim/runtime.c" \
		-o "$work/$b/runtime.o"
	gcc -O2 -Wall -c "$here/shim/rep.c" -o "$work/$b/rep.o"
	object "$b" "$here/shim/iommu_core.c" iommu_core
	object "$b" "$iommu/io-pgtable.c" io-pgtable
	object "$b" "$iommu/io-pgtable-arm.c" io-pgtable-arm
	object "$b" "$iommu/io-pgtable-arm-v7s.c" io-pgtable-arm-v7s
	for fmt in "${formats[@]}"; do
		object "$b" "$iommu/generic_pt/fmt/iommu_$fmt.c" "$fmt"
	done
	program "$b" bytes bytes -DKSHIM_BYTES -- io-pgtable.o io-pgtable-arm.o io-pgtable-arm-v7s.o \
		"${formats[@]/%/.o}" iommu_core.o
}

# program BUILD NAME BENCH [DEFINE...] -- OBJECT...
program() {
	local build=$1 name=$2 bench=$3 defines=()
	shift 3
	while [ "$1" != -- ]; do defines+=("$1"); shift; done
	shift
	gcc -O2 -Wall "${common[@]}" "${include[@]}" "${defines[@]}" "$here/bench/$bench.c" \
		"$work/$build/runtime.o" "$work/$build/rep.o" "${@/#/$work/$build/}" \
		-o "$work/$build/$name" -lpthread
}

# What each version has: of Linux before 6.0 page tables and bounce pools are built, and the DMA API and
# generic_pt of those since 7.2.
build() {
	local b=$1 iommu=$tree/drivers/iommu fmt formats=(amdv1 vtdss x86_64)

	mkdir -p "$work/$b"
	gcc -O2 -Wall "${common[@]}" "${include[@]}" -c "$here/shim/runtime.c" -o "$work/$b/runtime.o"
	gcc -O2 -Wall -c "$here/shim/rep.c" -o "$work/$b/rep.o"
	object "$b" "$here/shim/iommu_core.c" iommu_core
	object "$b" "$iommu/io-pgtable.c" io-pgtable
	object "$b" "$iommu/io-pgtable-arm.c" io-pgtable-arm
	object "$b" "$iommu/io-pgtable-arm-v7s.c" io-pgtable-arm-v7s
	program "$b" io_pgtable io_pgtable -- io-pgtable.o io-pgtable-arm.o io-pgtable-arm-v7s.o iommu_core.o
	echo lpae v7s >"$work/formats"

	object "$b" "$here/shim/swiotlb.c" swiotlb -DNOCOPY
	object "$b" "$here/shim/swiotlb.c" swiotlb_copy
	program "$b" swiotlb swiotlb -- swiotlb.o
	program "$b" swiotlb_copy swiotlb -DCOPY -- swiotlb_copy.o
	echo swiotlb swiotlb_copy >>"$work/formats"

	[ "$linux" -ge 600 ] || return 0
	object "$b" "$iommu/iova.c" iova
	object "$b" "$tree/lib/rbtree.c" rbtree
	program "$b" iova iova -- iova.o rbtree.o
	object "$b" "$here/shim/vfio_type1.c" vfio_type1 "${vfio[@]}"
	object "$b" "$here/shim/iommu_core.c" iommu_core_vfio "${vfio[@]}"
	program "$b" container_lpae container "${vfio[@]}" -- vfio_type1.o iommu_core_vfio.o rbtree.o \
		io-pgtable.o io-pgtable-arm.o io-pgtable-arm-v7s.o
	object "$b" "$here/shim/rsrc.c" rsrc "${uring[@]}"
	program "$b" registered registered "${uring[@]}" -- rsrc.o
	echo iova container_lpae registered >>"$work/formats"

	[ "$linux" -ge 702 ] || return 0
	object "$b" "$here/shim/dma_iommu.c" dma_iommu "${dma[@]}"
	object "$b" "$here/shim/iommu_core.c" iommu_core_dma "${dma[@]}"
	program "$b" dma_lpae dma "${dma[@]}" -- dma_iommu.o iommu_core_dma.o iova.o rbtree.o \
		swiotlb_copy.o io-pgtable.o io-pgtable-arm.o io-pgtable-arm-v7s.o
	for fmt in "${formats[@]}"; do
		object "$b" "$iommu/generic_pt/fmt/iommu_$fmt.c" "$fmt"
	done
	program "$b" generic_pt generic_pt "${formats[@]/#/-DWITH_}" -- "${formats[@]/%/.o}" iommu_core.o
	program "$b" dma_vtdss dma -DVTDSS "${dma[@]}" -- dma_iommu.o iommu_core_dma.o iova.o rbtree.o \
		swiotlb_copy.o vtdss.o
	program "$b" container_vtdss container -DVTDSS "${vfio[@]}" -- vfio_type1.o iommu_core_vfio.o \
		rbtree.o vtdss.o
	echo dma_lpae "${formats[@]}" dma_vtdss container_vtdss >>"$work/formats"
}

# A tree that an earlier version of this script left may lack a file.
[ -e "$tree/version" ] && [ -e "$tree/uring/linux" ] || fetch
common+=("-DKSHIM_VERSION_H=\"versions/$version.h\"" "-DLINUX=$linux")
what=${3:-timed}
# All that programs are made of: those of another call are kept where nothing of it has changed.
made_of=$(cd "$here" && find . -type f | LC_ALL=C sort | xargs sha256sum; gcc --version; cat "$tree/version")
[ "$(cat "$work/made-of-$what" 2>/dev/null)" != "$made_of" ] || exit 0
rm -f "$work/made-of-$what"
say "building what is compared of Linux $(cat "$tree/version")"
stub_headers
cut_core
case $what in
bytes) build_bytes ;;
contention)
	common+=(-g1 -DKSHIM_CPUS=4 -DKSHIM_CONTENTION)
	build c
	;;
*) for b in u k; do build "$b"; done ;;
esac
printf %s "$made_of" >"$work/made-of-$what"
