//! The formats of tables that the hardware walks.

use dmaspan::io_pgtable::{Format, VtdSs, X86_64};
use dmaspan::iommu::Incompatible;
use dmaspan::{Coherency, PhysAddr, Prot};

use super::spec::{self, PAGE_LG2, PRESENT, context, pasid};
use super::{Mode, Stage, VtdFeatures};
use crate::stream::require;

/// A format that VT-d walks: [`VtdSs`] or [`X86_64`].
pub trait VtdFormat: Format + sealed::Walked {}

impl VtdFormat for VtdSs {}
impl VtdFormat for X86_64 {}

/// What a stream's entry says: the words of a context entry of legacy mode, or the first words of a
/// PASID table's entry. All others are 0.
pub(crate) type Entry = [u64; 3];

pub(crate) mod sealed {
    use super::{Entry, Incompatible, Mode, PhysAddr, Stage, VtdFeatures};

    pub trait Walked {
        /// By which stage.
        const STAGE: Stage;

        /// Returns whether hardware walks tables of this configuration.
        fn fits(&self, features: &VtdFeatures, mode: Mode) -> Result<(), Incompatible>;

        /// Returns what hardware is told of tables with their root at `root`, in domain `domain`.
        fn entry(&self, root: PhysAddr, domain: u16, features: &VtdFeatures, mode: Mode) -> Entry;
    }
}

/// The entry for accesses that pass (9.3, 9.6): the widest addresses, and no tables.
pub(super) fn pass(features: &VtdFeatures, mode: Mode) -> Entry {
    let levels = [5, 4, 3].into_iter().find(|&levels| features.second_stage_levels(levels));
    let width = pasid::width(levels.unwrap_or(4));
    match mode {
        Mode::Legacy => {
            let domain = context::domain(spec::PASS_DOMAIN);
            [PRESENT | context::PASS, width >> 2 | domain, 0]
        }
        Mode::Scalable => [PRESENT | pasid::PASS | width, pasid::domain(spec::PASS_DOMAIN), 0],
    }
}

impl sealed::Walked for VtdSs {
    const STAGE: Stage = Stage::Second;

    fn fits(&self, features: &VtdFeatures, mode: Mode) -> Result<(), Incompatible> {
        let geometry = self.geometry();
        let snoops = self.template(0, PAGE_LG2, Prot::READ | Prot::CACHE) & spec::SNOOP != 0;
        let has_stage = mode == Mode::Legacy || features.scalable_second_stage();
        let has_levels = features.second_stage_levels(geometry.top_level + 1);
        let has_sizes = geometry.page_sizes & !features.second_stage_sizes() == 0;
        let marks = mode == Mode::Scalable && features.second_stage_dirty();
        require(&[
            (has_stage, "the IOMMU has no second stage in scalable mode"),
            (has_levels, "the IOMMU walks no tables of so many levels"),
            (has_sizes, "the IOMMU does not have leaves of all these sizes"),
            (features.snoop_control() || !snoops, "the IOMMU has no snoop control"),
            (marks || !self.tracks_dirty(), "the IOMMU sets no dirty bits"),
        ])
    }

    fn entry(&self, root: PhysAddr, domain: u16, features: &VtdFeatures, mode: Mode) -> Entry {
        let registers = self.registers(root);
        match mode {
            Mode::Legacy => {
                let [low, high] = registers.context_entry;
                [low | PRESENT, high | context::domain(domain), 0]
            }
            Mode::Scalable => {
                let [low, high] = registers.pasid_entry;
                let high = high & !pasid::SNOOPED_WALKS | snooped(features);
                let high = high | pasid::domain(domain);
                [low | PRESENT | pasid::SECOND_STAGE, high, 0]
            }
        }
    }
}

impl sealed::Walked for X86_64 {
    const STAGE: Stage = Stage::First;

    fn fits(&self, features: &VtdFeatures, mode: Mode) -> Result<(), Incompatible> {
        let geometry = self.geometry();
        let plain = self.template(0, PAGE_LG2, Prot::READ);
        let forbids = plain != self.template(0, PAGE_LG2, Prot::READ | Prot::NOEXEC);
        // Hardware would take it for a bit of the address.
        let encrypts = self.link(1, PhysAddr::new(0)) & spec::ADDRESS != 0;
        let has_stage = mode == Mode::Scalable && features.first_stage();
        let has_levels = geometry.top_level == 3 || features.first_stage_5_levels();
        let has_sizes = geometry.page_sizes & !features.first_stage_sizes() == 0;
        require(&[
            (has_stage, "the IOMMU has no first stage in this mode"),
            (has_levels, "the IOMMU walks no tables of so many levels"),
            (has_sizes, "the IOMMU does not have leaves of all these sizes"),
            (
                features.execute_requests() || !forbids,
                "the IOMMU does not tell instruction fetches apart",
            ),
            (!encrypts, "the IOMMU has no encryption bit"),
        ])
    }

    fn entry(&self, root: PhysAddr, domain: u16, features: &VtdFeatures, _mode: Mode) -> Entry {
        let width = pasid::width(self.geometry().top_level + 1);
        let low = PRESENT | pasid::FIRST_STAGE | width;
        let high = snooped(features) | pasid::domain(domain);
        [low, high, self.registers(root).pasid_entry]
    }
}

/// PWSNP where hardware has it.
fn snooped(features: &VtdFeatures) -> u64 {
    match features.walks(Mode::Scalable) {
        Coherency::Coherent => pasid::SNOOPED_WALKS,
        Coherency::NonCoherent => 0,
    }
}
