//! A container behind the interface, and arguments.

use std::sync::Arc;

use dmaspan::account::Counting;
use dmaspan::container::Version;
use dmaspan::container::type1::{Client, Type1, uapi};
use dmaspan::io_pgtable::Arena;
use dmaspan::{Account, Container, Errno, PhysAddr, UserAddr};
use dmaspan_sim::fault::Faults;
use dmaspan_sim::memory::{SimMemory, SimPinner, SimSpace};

use crate::common::faulty_domain;

pub(super) const PAGE: u64 = 4096;
/// Where the client's memory begins.
pub(super) const USER: u64 = 0x7f00_0000_0000;
/// How many pages it has there.
pub(super) const PAGES: u64 = 64;
/// What a domain of 48 bits translates last.
pub(super) const LAST: u64 = (1 << 48) - 1;

pub(super) const READ_WRITE: u32 = uapi::VFIO_DMA_MAP_FLAG_READ | uapi::VFIO_DMA_MAP_FLAG_WRITE;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backing {
    Domain,
    None,
}

pub(super) struct World {
    pub(super) memory: Arc<SimMemory>,
    pub(super) space: Arc<SimSpace>,
    pub(super) account: Arc<Account>,
    pub(super) tables: Arena,
    pub(super) container: Container<SimPinner, parking_lot::RawMutex>,
}

/// All that a failed request must leave as it is.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Snapshot {
    mappings: usize,
    leaves: Vec<(u32, u64)>,
    tables: usize,
    pinned_frames: u64,
    charged: u64,
    info: Vec<u8>,
    user: Vec<u8>,
}

impl World {
    pub(super) fn new(version: Version, backing: Backing) -> Self {
        Self::limited(version, backing, u64::MAX, 1 << 20)
    }

    /// With an account of `limit` bytes, and as many mappings.
    pub(super) fn limited(version: Version, backing: Backing, limit: u64, mappings: usize) -> Self {
        let (domain, tables, _) = faulty_domain::<12>(&Faults::none());
        let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 256 * PAGE, 12).unwrap());
        let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
        let spans = memory.allocate_scattered(PAGES * PAGE, 1).unwrap();
        space.map(UserAddr::new(USER), &spans).unwrap();
        let account = Account::with_counting(limit, Counting::Mappings);
        let pinner = SimPinner::new(Arc::clone(&memory));
        let container = match backing {
            Backing::Domain => Container::with_domain(pinner, domain, Account::new(0)),
            Backing::None => Container::new(pinner, Account::new(0)),
        };
        let container = container.with_version(version).with_max_mappings(mappings);
        Self { memory, space, account, tables, container }
    }

    pub(super) fn client(&self) -> Client<'_, SimPinner> {
        Client::new(&self.space, &self.account)
    }

    pub(super) fn type1(&self) -> Type1<'_, SimPinner, parking_lot::RawMutex> {
        Type1::new(&self.container)
    }

    pub(super) fn ask(&self, request: u32, arg: &mut [u8]) -> Result<u32, Errno> {
        self.type1().ioctl(&self.client(), request, arg)
    }

    pub(super) fn map(&self, flags: u32, vaddr: u64, iova: u64, size: u64) -> Result<u32, Errno> {
        self.ask(uapi::VFIO_IOMMU_MAP_DMA, &mut map_arg(32, flags, vaddr, iova, size))
    }

    /// What the kernel writes to the structure's size.
    pub(super) fn unmap(&self, flags: u32, iova: u64, size: u64) -> Result<u64, Errno> {
        let mut arg = unmap_arg(24, flags, iova, size);
        let before = arg.clone();
        let result = self.ask(uapi::VFIO_IOMMU_UNMAP_DMA, &mut arg);
        assert_eq!(arg[..16], before[..16], "only the size is written");
        match result {
            Ok(value) => {
                assert_eq!(value, 0);
                Ok(number(&arg, 16))
            }
            Err(errno) => {
                assert_eq!(arg, before, "a request that fails writes nothing");
                Err(errno)
            }
        }
    }

    pub(super) fn unmap_all(&self) -> Result<u64, Errno> {
        self.unmap(uapi::VFIO_DMA_UNMAP_FLAG_ALL, 0, 0)
    }

    pub(super) fn info(&self) -> Vec<u8> {
        let mut arg = info_arg(256, 256);
        assert_eq!(self.ask(uapi::VFIO_IOMMU_GET_INFO, &mut arg), Ok(0));
        arg
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        assert_eq!(self.memory.violations(), []);
        let mut user = vec![0; usize::try_from(PAGES * PAGE).unwrap()];
        self.space.read(UserAddr::new(USER), &mut user).unwrap();
        Snapshot {
            mappings: self.container.mappings(),
            leaves: self.container.census().sizes().collect(),
            tables: self.tables.tables(),
            pinned_frames: self.memory.pinned_frames(),
            charged: self.account.used(),
            info: self.info(),
            user,
        }
    }
}

/// Numbers as they lie in memory.
pub(super) fn bytes(words: &[u32], numbers: &[u64]) -> Vec<u8> {
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    bytes.extend(numbers.iter().flat_map(|number| number.to_ne_bytes()));
    bytes
}

pub(super) fn map_arg(argsz: u32, flags: u32, vaddr: u64, iova: u64, size: u64) -> Vec<u8> {
    bytes(&[argsz, flags], &[vaddr, iova, size])
}

pub(super) fn unmap_arg(argsz: u32, flags: u32, iova: u64, size: u64) -> Vec<u8> {
    bytes(&[argsz, flags], &[iova, size])
}

/// Of `len` bytes, all the same behind `argsz`.
pub(super) fn info_arg(argsz: u32, len: usize) -> Vec<u8> {
    let mut arg = vec![0xa5; len];
    let argsz = argsz.to_ne_bytes();
    let fits = len.min(4);
    arg[..fits].copy_from_slice(&argsz[..fits]);
    arg
}

pub(super) fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(*bytes[at..].first_chunk().unwrap())
}

pub(super) fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(*bytes[at..].first_chunk().unwrap())
}

pub(super) fn half(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes(*bytes[at..].first_chunk().unwrap())
}
