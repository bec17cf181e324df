//! The Ethernet switch, without I/O: frame batches, the port trait, the poll loop, the gateway.
