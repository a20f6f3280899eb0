//! A driver that forgets a command is found out: the commands are taken away on their way.

use dmaspan::Prot;
use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS2};
use dmaspan_qemu::Tap;

use crate::arm_smmu_v3::rig::{Rig, Tables, WRITERS, attach, map, unmap};

const RW: Prot = Prot::READ_WRITE.union(Prot::CACHE);
const IOVA: u64 = 0x1234_0000;
/// Opcodes (IHI 0070, 4.1): CFGI_STE; TLBI_NH_ASID, TLBI_NH_VA, TLBI_S12_VMALL and TLBI_S2_IPA.
const CONFIGURATION: [u64; 1] = [0x03];
const TRANSLATIONS: [u64; 4] = [0x11, 0x12, 0x28, 0x2a];
const SYNC: u64 = 0x46;

/// Makes syncs of all commands with these opcodes.
fn leave_out(tap: &Tap, opcodes: &'static [u64]) {
    tap.set_edit(Some(Box::new(|command| {
        if opcodes.contains(&(command[0] & 0xff)) {
            command.copy_from_slice(&[SYNC, 0]);
        }
    })));
}

fn stale<F: Tables>() -> bool {
    let Some(mut rig) = Rig::new() else { return true };
    let (domain, stream) = (rig.domain::<F>(), rig.stream::<F>(WRITERS[0]));
    attach(&stream, &domain);
    let buffer = rig.page();
    map(&domain, IOVA, buffer.paddr(), 0x1000, RW);
    assert!(rig.write(0, IOVA, &buffer));
    leave_out(&rig.tap, &TRANSLATIONS);
    unmap(&domain, IOVA, 0x1000, || ());
    rig.tap.set_edit(None);
    rig.write(0, IOVA, &buffer)
}

#[test]
fn without_an_invalidation_a_stale_entry_is_used() {
    assert!(stale::<ArmLpaeS1<12>>());
    assert!(stale::<ArmLpaeS2<12>>());
}

#[test]
fn with_the_number_of_another_domain_a_stale_entry_is_used() {
    let Some(mut rig) = Rig::new() else { return };
    let (domain, stream) = (rig.domain::<ArmLpaeS1<12>>(), rig.stream(WRITERS[0]));
    attach(&stream, &domain);
    let buffer = rig.page();
    map(&domain, IOVA, buffer.paddr(), 0x1000, RW);
    assert!(rig.write(0, IOVA, &buffer));
    rig.tap.set_edit(Some(Box::new(|command| {
        if command[0] & 0xff == 0x12 {
            command[0] += 1 << 48;
        }
    })));
    unmap(&domain, IOVA, 0x1000, || ());
    assert!(rig.write(0, IOVA, &buffer));
}

fn keeps_the_old_domain<F: Tables>() -> bool {
    let Some(mut rig) = Rig::new() else { return true };
    let (first, second) = (rig.domain::<F>(), rig.domain::<F>());
    let stream = rig.stream::<F>(WRITERS[0]);
    let [one, other] = [(); 2].map(|()| rig.page());
    map(&first, IOVA, one.paddr(), 0x1000, RW);
    map(&second, IOVA, other.paddr(), 0x1000, RW);
    attach(&stream, &first);
    assert!(rig.write(0, IOVA, &one));
    leave_out(&rig.tap, &CONFIGURATION);
    attach(&stream, &second);
    rig.tap.set_edit(None);
    // The device does not say that it arrived elsewhere.
    one.set_word(0, 0);
    let _ = rig.writers[0].write(IOVA, other.paddr(), 4);
    one.word(0) != 0
}

#[test]
fn without_a_configuration_invalidation_the_old_domain_is_used() {
    assert!(keeps_the_old_domain::<ArmLpaeS1<12>>());
    assert!(keeps_the_old_domain::<ArmLpaeS2<12>>());
}
