//! The kernel's description of its own types (BTF), and what of the programs depends on it.
//!
//! The kernel itself has one description, and each module one that continues it ("split BTF"): its
//! types are numbered on from the kernel's last one, and its strings lie behind the kernel's (Linux
//! Documentation/bpf/btf.rst). Distributions have connection tracking as a module. So both are
//! joined here into one, in which the loader finds the places of all fields.

use crate::conntrack::Conntrack;
use aya::{Btf, Endianness};
use aya_obj::btf::{BtfError, BtfKind};
use std::path::Path;

const FOLDER: &str = "/sys/kernel/btf";
/// What conntrack makes of a TCP frame's numbers. In a kernel with connection tracking as a module it
/// is the module's, also where the kernel itself describes connections.
const VERDICT: &str = "nf_ct_tcp_action";
const HEADER_BYTES: usize = 24;

/// Why there is no description that serves.
#[derive(Debug, thiserror::Error)]
pub enum TypesError {
    /// The kernel does not describe itself.
    #[error(
        "this kernel has no BTF ({0}): it needs CONFIG_DEBUG_INFO_BTF, as the kernels of Debian, Ubuntu and Fedora have"
    )]
    NoBtf(String),
    /// Connections are not in it.
    #[error(
        "this kernel describes no connection tracking, and has no module nf_conntrack loaded that does ({0}): try `modprobe nf_conntrack`; \
         it needs CONFIG_NF_CONNTRACK, and CONFIG_DEBUG_INFO_BTF_MODULES where that is a module"
    )]
    NoConntrack(String),
}

/// The types of the running kernel.
pub(crate) struct Types {
    /// With those of the module of connection tracking, if that has any that are read.
    pub(crate) btf: Btf,
    /// Connections are described by the module alone.
    is_module: bool,
}

fn file(name: &str) -> Result<Vec<u8>, String> {
    let path = Path::new(FOLDER).join(name);
    std::fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))
}

fn parsed(data: &[u8]) -> Result<Btf, BtfError> {
    Btf::parse(data, Endianness::default())
}

impl Types {
    /// Reads them; loads the module of connection tracking where the kernel has it as one, or where it
    /// may have.
    pub(crate) fn read() -> Result<Types, TypesError> {
        let own = file("vmlinux").map_err(TypesError::NoBtf)?;
        Types::of(&own, || {
            file("nf_conntrack").or_else(|_| {
                // The kernel loads it for any process that asks it about connections. Rules that
                // track do so too; the module by itself tracks nothing.
                let _ = Conntrack::open().map(|c| c.load_module());
                file("nf_conntrack")
            })
        })
    }

    /// Those of the kernel's own description and, where it lacks some, of that of the module. Kernels
    /// without [`VERDICT`] have the module asked in vain.
    fn of(own: &[u8], module: impl FnOnce() -> Result<Vec<u8>, String>) -> Result<Types, TypesError> {
        let btf = parsed(own).map_err(|e| TypesError::NoBtf(e.to_string()))?;
        let is_module = btf.id_by_type_name_kind("nf_conn", BtfKind::Struct).is_err();
        if !is_module && btf.id_by_type_name_kind(VERDICT, BtfKind::Enum).is_ok() {
            return Ok(Types { btf, is_module });
        }
        let module = match module() {
            Err(_) if !is_module => return Ok(Types { btf, is_module }),
            module => module.map_err(TypesError::NoConntrack)?,
        };
        let whole = joined(own, &module).ok_or_else(|| TypesError::NoConntrack("its BTF is malformed".into()))?;
        let btf = parsed(&whole).map_err(|e| TypesError::NoConntrack(e.to_string()))?;
        Ok(Types { btf, is_module })
    }

    /// The kernel's number of a function, if it has it.
    pub(crate) fn function(&self, name: &str) -> Option<u32> {
        self.btf.id_by_type_name_kind(name, BtfKind::Func).ok()
    }

    /// The number by which a program names a structure in `bpf_rdonly_cast`. A module's types have
    /// none there. Then a structure of the kernel's own serves that is nothing but a long row of
    /// plain numbers: of which type a pointer is says only which reads are allowed, and where a
    /// field is the loader has put into the instruction.
    pub(crate) fn structure(&self, name: &str) -> Option<u32> {
        let name = if self.is_module && name == "nf_conn" { "cpumask" } else { name };
        self.btf.id_by_type_name_kind(name, BtfKind::Struct).ok()
    }
}

/// The two parts of a description: types and strings (`struct btf_header`).
fn parts(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let word = |at: usize| Some(u32::from_ne_bytes(data.get(at..at + 4)?.try_into().ok()?) as usize);
    let part = |at: usize| {
        let start = word(4)?.checked_add(word(at)?)?;
        data.get(start..start.checked_add(word(at + 4)?)?)
    };
    Some((part(8)?, part(16)?))
}

/// A description and one that continues it, as one.
fn joined(own: &[u8], module: &[u8]) -> Option<Vec<u8>> {
    let ((types, strings), (more_types, more_strings)) = (parts(own)?, parts(module)?);
    let type_bytes = u32::try_from(types.len() + more_types.len()).ok()?;
    let string_bytes = u32::try_from(strings.len() + more_strings.len()).ok()?;
    let mut whole = own.get(..8)?.to_vec();
    whole[4..8].copy_from_slice(&(HEADER_BYTES as u32).to_ne_bytes());
    for number in [0, type_bytes, type_bytes, string_bytes] {
        whole.extend_from_slice(&number.to_ne_bytes());
    }
    for part in [types, more_types, strings, more_strings] {
        whole.extend_from_slice(part);
    }
    Some(whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A description of these types and strings, with something between the header and them.
    fn description(types: &[u8], strings: &[u8]) -> Vec<u8> {
        let mut data = vec![0x9f, 0xeb, 1, 0];
        for number in [32, 0, types.len() as u32, types.len() as u32, strings.len() as u32] {
            data.extend_from_slice(&u32::to_ne_bytes(number));
        }
        [&data[..], &[0xa5; 8], types, strings].concat()
    }

    /// An empty structure: name, kind with number of members, size.
    fn structure(name: u32, size: u32) -> Vec<u8> {
        [name, (BtfKind::Struct as u32) << 24, size].map(u32::to_ne_bytes).concat()
    }

    #[test]
    fn a_modules_types_are_numbered_on_and_its_names_lie_behind() {
        let own = description(&structure(1, 8), b"\0net\0");
        let module = description(&structure(5, 16), b"nf_conn\0");
        let btf = parsed(&joined(&own, &module).unwrap()).unwrap();
        let id = |name| btf.id_by_type_name_kind(name, BtfKind::Struct).ok();
        assert_eq!((id("net"), id("nf_conn"), id("veth")), (Some(1), Some(2), None));
    }

    #[test]
    fn the_module_is_asked_for_what_the_kernel_itself_does_not_describe() {
        // An enumeration of one value: name, kind with number of values, size; the value's name and itself.
        let verdict = |name: u32| [name, (BtfKind::Enum as u32) << 24 | 1, 4, 0, 0].map(u32::to_ne_bytes).concat();
        let own = description(&structure(1, 8), b"\0nf_conn\0");
        let module = description(&verdict(9), b"nf_ct_tcp_action\0");
        let has_verdict = |types: &Types| types.btf.id_by_type_name_kind(VERDICT, BtfKind::Enum).is_ok();
        let both = Types::of(&own, || Ok(module.clone())).unwrap();
        assert!(has_verdict(&both) && !both.is_module && both.structure("nf_conn") == Some(1));
        // Connection tracking is built in, and has no such verdicts.
        let old = Types::of(&own, || Err("there is none".into())).unwrap();
        assert!(!has_verdict(&old) && !old.is_module);
        let whole = description(&[structure(1, 8), verdict(9)].concat(), b"\0nf_conn\0nf_ct_tcp_action\0");
        assert!(has_verdict(&Types::of(&whole, || panic!("nothing is missing")).unwrap()));
        // All of it is the module's.
        let bare = description(&structure(1, 8), b"\0cpumask\0");
        let module = description(&[structure(9, 8), verdict(17)].concat(), b"nf_conn\0nf_ct_tcp_action\0");
        let modular = Types::of(&bare, || Ok(module)).unwrap();
        assert!(has_verdict(&modular) && modular.is_module && modular.structure("nf_conn") == Some(1));
        assert!(matches!(Types::of(&bare, || Err("none".into())), Err(TypesError::NoConntrack(_))));
    }

    #[test]
    fn a_description_that_lies_about_its_parts_is_none() {
        let good = description(&structure(1, 8), b"\0net\0");
        for length in 0..good.len() {
            assert_eq!(joined(&good[..length], &good), None, "{length}");
            assert_eq!(joined(&good, &good[..length]), None, "{length}");
        }
        for at in [4, 8, 12, 16, 20] {
            let mut bad = good.clone();
            bad[at..at + 4].copy_from_slice(&u32::MAX.to_ne_bytes());
            assert_eq!(joined(&bad, &good), None, "{at}");
        }
    }
}
