//! Each target for as long as it is told, a second by default; see the crate's head.
#![allow(missing_docs)]

use std::path::Path;
use tombolo_fuzz::{calls, merge, run, span, targets, xen};

macro_rules! fuzz {
    ($module:ident: $($name:ident)+) => {
        $(
            #[test]
            fn $name() {
                run(stringify!($name), Path::new(env!("CARGO_TARGET_TMPDIR")), $module::$name);
            }
        )+
    };
}

fuzz!(targets: ring ivshmem gateway nat nat6 offload stream typed vxlan);
fuzz!(calls: calls_link calls_stream calls_hello);
fuzz!(merge: merge);
fuzz!(span: span span_stream);
fuzz!(xen: xen_transmit xen_receive xen_control xen_store);
