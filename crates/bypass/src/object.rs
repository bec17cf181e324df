//! The compiled eBPF object, made fit for the running kernel, and loaded.
//!
//! Two things of the object depend on the kernel. Where the fields of its structures are is CO-RE's
//! business, and aya does it. Which numbers its functions ("kfuncs") and some of its types have is
//! not, so it is done here, in the object's bytes, before aya sees them: instructions with a
//! place-holder get the BTF id.
//!
//! Kernels before 6.2 lack those functions. They get another object, of the same source, without
//! place-holders.

use std::sync::OnceLock;

use crate::types::{Types, TypesError};
use aya::programs::{SchedClassifier, TestRun, TestRunOptions, Xdp};
use aya::{Ebpf, EbpfLoader};
use aya_obj::btf::BtfKind;

/// Set to 1: what kernels before 6.2 have is used on every kernel, for tests.
pub(crate) const AS_OLD: &str = "TOMBOLO_BYPASS_AS_OLD";

/// The object as clang made it.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/bypass.bpf.o"));
/// The same for kernels that give programs no typed pointers.
static OLD_OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/bypass-old.bpf.o"));

/// Asks the kernel what it can.
static ASK_OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/ask.bpf.o"));

/// CALL with src_reg BPF_PSEUDO_KFUNC_CALL, no offset: a function of vmlinux.
const CALL_KFUNC: [u8; 4] = [0x85, 0x20, 0, 0];
/// MOV r2, imm: the second argument of bpf_rdonly_cast.
const SET_TYPE: [u8; 4] = [0xb7, 0x02, 0, 0];

/// Instructions with place-holders, as in ebpf/kernel.h, and what of the kernel they stand for.
const HOLDERS: [([u8; 4], u32, BtfKind, &str); 7] = [
    (CALL_KFUNC, 0x7fb0_a001, BtfKind::Func, "bpf_cast_to_kern_ctx"),
    (CALL_KFUNC, 0x7fb0_a002, BtfKind::Func, "bpf_rdonly_cast"),
    (SET_TYPE, 0x7fb0_b001, BtfKind::Struct, "nf_conn"),
    (SET_TYPE, 0x7fb0_b002, BtfKind::Struct, "dst_entry"),
    (SET_TYPE, 0x7fb0_b003, BtfKind::Struct, "dst_metrics"),
    (SET_TYPE, 0x7fb0_b004, BtfKind::Struct, "net_device"),
    (SET_TYPE, 0x7fb0_b005, BtfKind::Struct, "rtable"),
];

/// The function of the kernel by which it gives programs typed pointers.
const TYPED_POINTERS: &str = "bpf_rdonly_cast";

/// Names of the programs in the object.
pub(crate) const TCX_IN: &str = "tcx_in";
pub(crate) const TCX_OUT: &str = "tcx_out";
pub(crate) const XDP_IN: &str = "xdp_in";
pub(crate) const INJECT: &str = "inject";
const ASK_IPV6: &str = "ask_ipv6";

/// Why the programs could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The kernel does not describe itself.
    #[error(transparent)]
    Types(#[from] TypesError),
    /// A kernel function or type is missing.
    #[error("this kernel's BTF has no {0}, which the programs read")]
    Missing(&'static str),
    /// The object has no use of it where there must be one: it was compiled from other sources than
    /// these.
    #[error("the object does not use {0}; build the program again")]
    NoUse(&'static str),
    /// The kernel refused a program or a map.
    #[error(
        "the kernel refused the eBPF {what}: {cause}. Needed: Linux 5.14 or later (older ones are not tested), CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON (root has them)"
    )]
    Refused {
        /// Which program, or the maps.
        what: String,
        /// The kernel's errno and the verifier's words.
        cause: String,
    },
}

/// Puts the kernel's ids into the instructions that wait for them.
fn link_ids(object: &mut [u8], id: impl Fn(&'static str, BtfKind) -> Option<u32>) -> Result<(), LoadError> {
    for (instruction, holder, kind, name) in HOLDERS {
        let wanted = id(name, kind).ok_or(LoadError::Missing(name))?;
        let mut found = 0;
        for at in (0..object.len().saturating_sub(8)).step_by(8) {
            let (code, number) = object[at..at + 8].split_at_mut(4);
            if code == instruction && number == holder.to_le_bytes() {
                number.copy_from_slice(&wanted.to_le_bytes());
                found += 1;
            }
        }
        if found == 0 {
            return Err(LoadError::NoUse(name));
        }
    }
    Ok(())
}

/// Every cause of an error, outermost first.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        let said = error.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        next = error.source();
    }
    text
}

/// Whether to use what older kernels have, even if this kernel has more.
pub(crate) fn is_as_old() -> bool {
    std::env::var_os(AS_OLD).is_some_and(|value| value == "1")
}

/// Whether the programs of mode tcx can translate IPv6 here: from Linux 6.16 on, and on older
/// kernels that have taken over the fix. `None` where the kernel cannot be asked, as without root.
pub(crate) fn translates_ipv6() -> Option<bool> {
    static ANSWER: OnceLock<Option<bool>> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        // It looks at none of the kernel's types, which take milliseconds to read.
        let mut object = EbpfLoader::new().btf(None).load(ASK_OBJECT).ok()?;
        let program: &mut SchedClassifier = object.program_mut(ASK_IPV6)?.try_into().ok()?;
        program.load().ok()?;
        // An Ethernet header, IPv6's and the beginning of a transport's.
        let frame = [0; 14 + 40 + 20];
        let result = program.test_run(TestRunOptions { data_in: Some(&frame), ..TestRunOptions::new() }).ok()?;
        Some(result.return_value == 1)
    })
}

/// The object for this kernel, with its ids.
fn fitting(types: &Types) -> Result<Vec<u8>, LoadError> {
    if is_as_old() || types.function(TYPED_POINTERS).is_none() {
        return Ok(OLD_OBJECT.to_vec());
    }
    let mut object = OBJECT.to_vec();
    link_ids(&mut object, |name, kind| match kind {
        BtfKind::Func => types.function(name),
        _ => types.structure(name),
    })?;
    Ok(object)
}

/// Loads all programs and maps into the kernel. They go again with the value, unless pinned.
pub(crate) fn load() -> Result<Ebpf, LoadError> {
    let types = Types::read()?;
    loaded(&types, &fitting(&types)?)
}

fn loaded(types: &Types, object: &[u8]) -> Result<Ebpf, LoadError> {
    let refused = |what: &str, cause: String| LoadError::Refused { what: what.into(), cause };
    let mut loaded = EbpfLoader::new().btf(Some(&types.btf)).load(object).map_err(|e| refused("maps", chain(&e)))?;
    for (name, program) in loaded.programs_mut() {
        let name = name.to_owned();
        let done = if let Ok(program) = <&mut SchedClassifier>::try_from(&mut *program) {
            program.load()
        } else {
            <&mut Xdp>::try_from(program).and_then(Xdp::load)
        };
        done.map_err(|e| refused(&format!("program {name}"), chain(&e)))?;
    }
    Ok(loaded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_holder_is_replaced() {
        let mut object = OBJECT.to_vec();
        link_ids(&mut object, |name, _| Some(name.len() as u32)).unwrap();
        for (_, holder, ..) in HOLDERS {
            assert!(!object.windows(4).any(|w| w == holder.to_le_bytes()), "{holder:#x} is left");
        }
    }

    #[test]
    fn what_the_kernel_lacks_is_named() {
        let error = link_ids(&mut OBJECT.to_vec(), |_, _| None).unwrap_err();
        assert!(error.to_string().contains("bpf_cast_to_kern_ctx"), "{error}");
    }

    #[test]
    fn the_object_for_older_kernels_has_no_place_holders() {
        for (_, holder, ..) in HOLDERS {
            assert!(!OLD_OBJECT.windows(4).any(|w| w == holder.to_le_bytes()), "{holder:#x}");
        }
    }

    #[test]
    fn an_object_without_calls_is_not_loaded() {
        assert!(matches!(link_ids(&mut [0; 64], |_, _| Some(1)), Err(LoadError::NoUse(_))));
    }

    #[test]
    fn the_kernels_verifier_takes_all_programs() {
        if !rustix::process::geteuid().is_root() {
            return tombolo_testing::skip("loading eBPF programs needs root");
        }
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        let mut numbers = release.split(['.', '-']).map(|n| n.parse::<u32>().unwrap_or(0));
        if (numbers.next(), numbers.next()) < (Some(5), Some(14)) {
            return tombolo_testing::skip(format!("the bypass cannot work before Linux 5.14, this is {release}"));
        }
        let types = Types::read().unwrap();
        for object in [fitting(&types).unwrap(), OLD_OBJECT.to_vec()] {
            let loaded = loaded(&types, &object).unwrap_or_else(|e| panic!("{e}"));
            for (name, program) in loaded.programs() {
                // The kernel follows a million at most, of which a change of the programs should
                // leave enough.
                let followed = program.info().ok().and_then(|i| i.verified_instruction_count()).unwrap_or(0);
                println!("{name}: {followed} instructions followed");
                assert!(followed < 800_000, "{name}: the verifier follows {followed} instructions");
            }
        }
    }
}
