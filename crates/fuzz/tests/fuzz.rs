//! Each target for as long as it is told, a second by default; see the crate's head.
#![allow(missing_docs)]

use std::path::Path;
use tombolo_fuzz::{run, targets};

macro_rules! fuzz {
    ($($name:ident)+) => {
        $(
            #[test]
            fn $name() {
                run(stringify!($name), Path::new(env!("CARGO_TARGET_TMPDIR")), targets::$name);
            }
        )+
    };
}

fuzz!(ring ivshmem gateway nat offload stream typed);
