//! One suite for every IO page-table format.
//!
//! A [`Subject`] names a format, the configurations to try and the walker that judges it.
//! [`format_suite!`](crate::format_suite) makes a test of every case for it. No case knows a
//! granule, a page size or an address: all come from the format's
//! [`Geometry`](dmaspan::io_pgtable::Geometry), so that a format of 2K pages and 19 bits runs the
//! same bodies as one of 64K pages and 52 bits.
//!
//! The cases are those of Linux's KUnit suites for generic_pt and io-pgtable, random operations
//! against an interval map, every error, and every failure of the table memory. Choices are drawn
//! from fixed seeds: a failure repeats, and names its configuration.
//!
//! ```
//! use dmaspan::PhysAddr;
//! use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config};
//! use dmaspan_sim::suite::Subject;
//! use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
//!
//! /// Arm's stage 1 with pages of 4K, and the walker that was written from Arm's manual.
//! struct Arm4k;
//!
//! impl Subject for Arm4k {
//!     type Format = ArmLpaeS1<12>;
//!     type Walker = ArmLpaeS1Walker;
//!
//!     fn configs() -> Vec<(String, Self::Format)> {
//!         [36, 48]
//!             .map(|bits| {
//!                 let format = ArmLpaeS1::new(ArmLpaeS1Config::new(bits, 48)).unwrap();
//!                 (format!("{bits} bits"), format)
//!             })
//!             .into()
//!     }
//!
//!     fn walker(format: &Self::Format, root: PhysAddr, _top_level: u32) -> Self::Walker {
//!         ArmLpaeS1Walker::new(format.registers(root).into()).unwrap()
//!     }
//! }
//!
//! dmaspan_sim::format_suite!(arm_4k, Arm4k);
//!
//! // A case by itself, as each of the tests calls one.
//! fn main() {
//!     dmaspan_sim::suite::cases::every_size_is_one_leaf::<Arm4k>();
//! }
//! ```

mod boundaries;
mod codec;
mod dirty;
mod errors;
mod failures;
mod growth;
mod leaves;
mod listing;
mod marks;
mod memory;
mod noncoherent;
mod pages;
mod random;
mod rewrite;
mod rig;
mod soft;
mod space;
mod stale;
mod stress;
mod survey;
mod threads;
mod tree;
mod whole_tables;

use dmaspan::io_pgtable::{Arena, Format};
use dmaspan::{IovaRange, PhysAddr};

use crate::walker::Walker;
use space::Space;

/// A format on trial.
pub trait Subject: 'static {
    /// The format.
    type Format: Format + Clone;
    /// What judges it: a walker written from the manual, not from the format.
    type Walker: Walker + Send + Sync;

    /// The configurations to try, each with a name for the report. Widths at both ends of what the
    /// format has are worth most; each has room for 256 of the smallest leaves.
    fn configs() -> Vec<(String, Self::Format)>;

    /// Hardware that was given what the format computes for its registers, for a tree whose root
    /// is at `root` and has entries of `top_level`.
    fn walker(format: &Self::Format, root: PhysAddr, top_level: u32) -> Self::Walker;

    /// What the manual forbids and a walk does not notice, such as reserved bits, looked for in
    /// everything that is mapped in `range`.
    ///
    /// # Errors
    ///
    /// What was found.
    fn strict(_walker: &Self::Walker, _tables: &Arena, _range: IovaRange) -> Result<(), String> {
        Ok(())
    }
}

/// The bodies of the suite. Each runs all configurations of a subject, and panics where the format,
/// the page table, the model and the walker disagree.
pub mod cases {
    pub use super::boundaries::*;
    pub use super::codec::*;
    pub use super::dirty::*;
    pub use super::errors::*;
    pub use super::failures::*;
    pub use super::growth::*;
    pub use super::leaves::*;
    pub use super::listing::*;
    pub use super::marks::*;
    pub use super::memory::*;
    pub use super::noncoherent::*;
    pub use super::pages::*;
    pub use super::random::*;
    pub use super::rewrite::*;
    pub use super::soft::*;
    pub use super::stale::*;
    pub use super::stress::*;
    pub use super::threads::*;
    pub use super::whole_tables::*;
}

/// Makes a module of tests: every case of [`suite::cases`](crate::suite::cases) for a
/// [`Subject`](crate::suite::Subject).
///
/// `format_suite!(name, Type)`; the report says `name::case`.
#[macro_export]
macro_rules! format_suite {
    ($name:ident, $subject:ty) => {
        $crate::format_suite!(
            @tests $name, $subject:
            the_geometry_is_consistent,
            leaves_decode_as_they_were_encoded,
            links_decode_as_they_were_encoded,
            addresses_advance_as_they_are_encoded,
            permissions_are_granted_alike_at_all_sizes,
            permissions_read_back_by_the_walker,
            every_size_is_one_leaf,
            the_last_leaf_of_both_spaces_maps,
            large_leaves_replace_emptied_tables_only,
            leaves_are_never_split_by_an_unmap,
            batches_equal_single_pages,
            unmapping_stops_at_the_first_hole,
            protecting_changes_permissions_alone,
            hardware_marks_any_entry_of_a_leaf,
            marks_are_read_among_holes_and_in_parts_of_leaves,
            unmapping_reports_marks,
            mappings_go_over_table_borders_with_the_fewest_leaves,
            the_page_size_boundary_case_maps_every_byte,
            the_mixed_case_has_twenty_leaves,
            trees_grow_and_keep_what_they_translate,
            bad_arguments_of_map_pages_change_nothing,
            bad_arguments_of_map_spans_change_nothing,
            permissions_without_an_entry_are_refused,
            pages_over_leaves_change_nothing,
            collisions_take_everything_back,
            collisions_in_lists_of_pages_take_everything_back,
            unmaps_of_holes_and_parts_change_nothing,
            nothing_to_unmap_gathers_nothing,
            owners_stay_in_their_range,
            every_failing_allocation_leaves_everything_as_before,
            unmapping_blocks_over_full_tables_frees_all_of_them,
            unmapping_needs_no_tables,
            a_mapping_taken_back_leaves_all_tables,
            an_unmap_passes_over_what_was_unmapped_meanwhile,
            bitmaps_are_exact_to_the_leaf,
            the_last_page_is_reported,
            an_unmap_by_batches_loses_no_write,
            bad_requests_for_marks_change_nothing,
            no_write_escapes_a_reader_that_clears,
            a_leaf_is_split_as_little_as_a_border_takes,
            a_split_breaks_only_where_hardware_needs_it,
            a_refused_split_changes_nothing,
            a_split_whose_sync_fails_keeps_all_translations,
            a_domain_maps_pages_up_to_what_is_in_the_way,
            pages_that_hardware_does_not_take_are_taken_back,
            larger_pages_go_where_tables_became_empty,
            an_unmap_of_pages_cuts_leaves_where_it_is_told_to,
            pages_without_tables_can_be_asked_for_again,
            an_unmap_of_pages_that_cannot_cut_takes_nothing,
            every_permission_becomes_every_other,
            a_refused_protect_changes_nothing,
            groups_are_broken_whole_and_by_bounded_batches,
            hardware_has_a_new_root_before_it_is_needed,
            the_first_leaf_may_be_larger_than_the_tree,
            a_refused_root_leaves_the_old_one_in_use,
            a_refused_root_takes_its_tables_with_it,
            beyond_the_root_is_a_hole,
            a_tree_that_cannot_grow_stays_as_it_is,
            threads_grow_a_tree_together,
            everything_is_written_back_before_a_call_returns,
            changes_in_place_are_written_back,
            new_roots_are_written_back,
            scattered_pages_write_each_line_back_once,
            who_maps_below_a_link_in_the_cache_writes_it_back,
            every_mapping_has_the_fewest_leaves,
            random_operations_agree_with_an_interval_map,
            hardware_keeps_nothing_stale_behind_a_sync_of_what_was_gathered,
            a_size_that_a_gather_loses_is_found,
            software_iommus_translate_as_the_walker_does,
            a_software_iommu_finds_a_whole_span_in_one_walk,
            a_software_iommu_marks_what_it_writes,
            a_software_iommu_follows_a_tree_that_grows,
            device_models_use_nothing_behind_a_sync,
            a_software_iommu_ends_every_walk_of_hostile_tables,
            disjoint_ranges_are_mapped_in_parallel,
            racing_threads_install_each_table_once,
            threads_with_random_operations_keep_to_their_pieces,
            a_failed_map_keeps_the_tables_as_they_are,
            a_walk_may_begin_inside_a_leaf,
            an_unmap_of_exactly_a_table_frees_all_below_it,
            changes_in_place_check_their_arguments,
            lists_of_large_spans_are_mapped_by_aligned_leaves,
            walks_and_dumps_show_what_hardware_finds,
            leaves_that_follow_each_other_are_one_run,
            walks_beside_a_thread_that_maps_show_what_is_mapped,
        );
    };
    (@tests $name:ident, $subject:ty: $($case:ident,)*) => {
        #[cfg(test)]
        mod $name {
            use super::*;
            $(
                #[test]
                fn $case() {
                    $crate::suite::cases::$case::<$subject>();
                }
            )*
        }
    };
}

/// log2 of the smallest leaves that every configuration has room for: cases lay out their ranges in
/// that many.
const LG2_LEAST_LEAVES: u32 = 8;

/// Runs a case in every configuration; where it panics, the report names the configuration.
fn each<S: Subject>(mut case: impl FnMut(S::Format)) {
    for (name, format) in S::configs() {
        let _named = Named(&name);
        let Space { input_bits, granule_lg2, .. } = Space::of(&format);
        let least = granule_lg2 + LG2_LEAST_LEAVES;
        assert!(
            input_bits >= least,
            "{input_bits} bits are too few for the suite: {least} or more"
        );
        case(format);
    }
}

/// [`each`], of those that keep dirty state.
fn each_with_marks<S: Subject>(mut case: impl FnMut(S::Format)) {
    each::<S>(|format| {
        if format.tracks_dirty() {
            case(format);
        }
    });
}

/// Says where a panic happened, on its way.
struct Named<'a>(&'a str);

impl Drop for Named<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("in the configuration {}", self.0);
        }
    }
}

/// How often a configuration repeats a random case, where all of a subject's together do it `total`
/// times.
fn share<S: Subject>(total: u64) -> u64 {
    (total / S::configs().len().max(1) as u64).max(2)
}

#[cfg(test)]
mod tests {
    use dmaspan::io_pgtable::{AmdV1, AmdV1Config};

    use super::*;
    use crate::walker::amd_v1::AmdV1Walker;

    /// A tree of two pages.
    struct Tiny;

    impl Subject for Tiny {
        type Format = AmdV1;
        type Walker = AmdV1Walker;

        fn configs() -> Vec<(String, AmdV1)> {
            vec![("13 bits".to_owned(), AmdV1::new(AmdV1Config::new(13, 48)).unwrap())]
        }

        fn walker(_: &AmdV1, _: PhysAddr, _: u32) -> AmdV1Walker {
            unreachable!("no case begins")
        }
    }

    #[test]
    #[should_panic(expected = "13 bits are too few for the suite: 20 or more")]
    fn a_tree_too_small_for_the_cases_is_named_as_that() {
        cases::unmapping_stops_at_the_first_hole::<Tiny>();
    }
}
