//! With the feature `log` what leaks is said, and where virtual addresses are used. A program of
//! its own: the rest is tested without the feature.

#[path = "../../../dmaspan-drivers/tests/shared/capture.rs"]
mod capture;
#[path = "../it/plan/kernel.rs"]
#[expect(dead_code, reason = "plans, which are tested elsewhere, use the rest")]
mod kernel;

use dmaspan::pin::{Kind, Pinner, SpanSink, Stopped};
use dmaspan::{HostAddr, Prot, Span};
use dmaspan_linux::LinuxPinner;
use dmaspan_linux::plan::{Mapper, Region};
use log::Level::{Info, Warn};

use capture::{assert_said, said};
use kernel::{Kernel, RW, memory, x86};

#[test]
fn memory_that_a_space_does_not_unmap_is_said_with_its_range() {
    let kernel = Kernel::new(x86());
    let mapper = Mapper::shared(kernel.clone()).unwrap();
    let pages = memory(2);
    let mapped = mapper.map([Region::whole(&pages, RW)]).unwrap();
    let iova = mapped.iova(0).unwrap().to_string();
    kernel.state().failing_unmaps = vec![1];
    let ((), messages) = said(|| drop(mapped));
    let user = pages.user_range().to_string();
    assert_said(&messages, Warn, &[&user, &iova, "was not unmapped and leaks"]);
    assert!(mapper.leaked_bytes() > 0);
}

struct Sink;

impl SpanSink<HostAddr> for Sink {
    fn push(&mut self, _span: Span<HostAddr>, _kind: Kind) -> Result<(), Stopped> {
        Ok(())
    }
}

#[test]
fn virtual_addresses_and_a_pin_that_is_dropped_are_said() {
    let (pinner, messages) = said(LinuxPinner::<HostAddr>::new);
    assert_said(&messages, Info, &["virtual addresses", "in the place of physical ones"]);
    let (pinner, page) = (pinner.unwrap(), memory(1));
    let pin = pinner.pin(&page, page.user_range(), Prot::READ, &mut Sink).map_err(|f| f.error);
    let pin = pin.unwrap();
    let ((), messages) = said(|| drop(pin));
    let user = page.user_range().to_string();
    assert_said(&messages, Warn, &["the pin of", &user, "stays pinned"]);
    let pin = pinner.pin(&page, page.user_range(), Prot::READ, &mut Sink).map_err(|f| f.error);
    let ((), messages) = said(|| pinner.give_back(pin.unwrap()));
    assert_eq!(messages, []);
}
