//! Memory that virtual machines share (IVSHMEM): the devices, the network over them, and
//! channels for code that wants no network.
//!
//! | file | noun |
//! | --- | --- |
//! | device.rs | the PCI device: registers, doorbells, sections, state words |
//! | v2.rs | what the second version of the device says of itself (pure) |
//! | net.rs | a network link, as the stack's device |
//! | link.rs | a link as an app has it: sections, state, doorbells, waiting |
//! | handshake.rs | the state words of the cell and its one peer, followed |
//! | channel.rs | records between two peers |
//! | first_ring.rs | whether a peer was heard, and the looks until then (pure) |
//! | poll_interval.rs | how often a link without doorbell is looked at (pure) |

pub(crate) mod channel;
pub(crate) mod device;
mod first_ring;
pub(crate) mod handshake;
pub(crate) mod link;
pub(crate) mod net;
pub(crate) mod poll_interval;
mod v2;
