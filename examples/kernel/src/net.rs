//! A network: the driver of `virtio-drivers` below the stack of `smoltcp`, which answers echoes.

use alloc::vec::Vec;

use dmaspan::platform::Flag;
use dmaspan_virtio_drivers::{BehindIommu, hal};
use smoltcp::iface::{Config, Interface, SocketSet};
use smoltcp::phy::{self, DeviceCapabilities, Medium};
use smoltcp::time::Instant;
use smoltcp::wire::{EthernetAddress, IpAddress, IpCidr};
use virtio_drivers::device::net::VirtIONet;
use virtio_drivers::transport::pci::PciTransport;

use crate::{Result, cpu};

hal! {
    /// What the network card reaches.
    pub(crate) struct NetHal: Flag;
}

const QUEUE: usize = 16;
const FRAME: usize = 1514;
/// The address of the kernel.
const ADDRESS: IpAddress = IpAddress::v4(10, 0, 0, 2);
/// Nanoseconds that somebody has to send what is to be answered.
const LIMIT: u64 = 150_000_000_000;

struct Card {
    driver: VirtIONet<NetHal, BehindIommu<PciTransport>, QUEUE>,
    /// Echoes that it has answered.
    answered: u32,
}

impl phy::Device for Card {
    type RxToken<'a> = Received;
    type TxToken<'a> = Sending<'a>;

    fn receive(&mut self, _: Instant) -> Option<(Received, Sending<'_>)> {
        let buffer = self.driver.receive().ok()?;
        let packet = buffer.packet().to_vec();
        self.driver.recycle_rx_buffer(buffer).ok()?;
        Some((Received(packet), Sending(self)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Sending<'_>> {
        Some(Sending(self))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = FRAME;
        capabilities
    }
}

struct Received(Vec<u8>);

impl phy::RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0)
    }
}

struct Sending<'a>(&'a mut Card);

impl phy::TxToken for Sending<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut buffer = self.0.driver.new_tx_buffer(len);
        let result = f(buffer.packet_mut());
        // IPv4, ICMP, and an answer.
        let packet = buffer.packet();
        let is_answer = packet.get(12..14) == Some(&[8, 0]) && packet.get(23) == Some(&1);
        let is_answer = is_answer && packet.get(34) == Some(&0);
        if self.0.driver.send(buffer).is_ok() && is_answer {
            self.0.answered += 1;
        }
        result
    }
}

/// Answers so many echoes.
pub(crate) fn answer(transport: BehindIommu<PciTransport>, echoes: u32) -> Result<()> {
    let mut card = Card { driver: VirtIONet::new(transport, 2048)?, answered: 0 };
    let began = cpu::nanoseconds();
    let now = || Instant::from_millis((cpu::nanoseconds() / 1_000_000) as i64);
    let mac = EthernetAddress(card.driver.mac_address());
    let mut interface = Interface::new(Config::new(mac.into()), &mut card, now());
    interface.update_ip_addrs(|addresses| {
        addresses.push(IpCidr::new(ADDRESS, 24)).ok();
    });
    println!("network: {mac} answers at {ADDRESS}");
    let mut sockets = SocketSet::new(Vec::new());
    while card.answered < echoes {
        interface.poll(now(), &mut card, &mut sockets);
        if cpu::nanoseconds() - began > LIMIT {
            return Err("nobody sent as many echoes as are to be answered".into());
        }
    }
    println!("network: {} echoes answered", card.answered);
    Ok(())
}
