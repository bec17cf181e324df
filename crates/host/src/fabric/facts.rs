//! What a plan needs to know of this machine: its QEMU, KVM, and Xen's toolstack.

use std::path::PathBuf;

use crate::file::{self, Fabric};
use crate::plan::Facts;
use crate::qemu::probe::{self, Qemu};
use crate::rundir;
use crate::xen::toolstack;

/// Why [`Facts::kvm`] has no answer.
pub(super) const NOT_ASKED: &str = "not asked";

/// Whether KVM runs a guest here: found out once per boot and QEMU, since where it does not the
/// question takes seconds.
fn kvm(qemu: &Qemu) -> Result<(), String> {
    #[derive(serde::Serialize, serde::Deserialize)]
    struct Known {
        boot: String,
        qemu: PathBuf,
        version: (u32, u32, u32),
        answer: Result<(), String>,
    }
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let place = rundir::runtime_root().ok().map(|root| root.join("kvm.json"));
    let known =
        place.as_ref().and_then(|p| std::fs::read(p).ok()).and_then(|t| serde_json::from_slice::<Known>(&t).ok());
    if let Some(known) = known
        && (known.boot.as_str(), &known.qemu, known.version) == (boot.as_str(), &qemu.path, qemu.version)
    {
        return known.answer;
    }
    let answer = probe::kvm(&qemu.path).map(|_| ());
    let known = Known { boot, qemu: qemu.path.clone(), version: qemu.version, answer: answer.clone() };
    if let (Some(place), Ok(text)) = (place, serde_json::to_vec(&known)) {
        // Without a place to remember it the question is asked again next time.
        let _ = rundir::write_whole(&place, &text);
    }
    answer
}

/// Finds out what the plan needs to know. KVM is asked only if a machine may use it.
pub fn facts(fabric: &Fabric, runtime: PathBuf) -> Facts {
    let is_xen = |m: &&file::Machine| m.attach == file::Attach::Xen;
    let xl = match fabric.machines.iter().find(is_xen) {
        Some(_) => toolstack::find(),
        None => Err(NOT_ASKED.into()),
    };
    let qemu = if fabric.machines.iter().all(|m| is_xen(&m)) {
        Err("not looked for".into())
    } else {
        probe::find().map_err(|e| e.to_string())
    };
    let wanted = fabric.machines.iter().any(|m| m.accel != file::Accel::Tcg && !is_xen(&m));
    let kvm = match &qemu {
        Ok(qemu) if wanted => kvm(qemu),
        _ => Err(NOT_ASKED.into()),
    };
    Facts { qemu, kvm, xl, runtime, tsc: probe::tsc() }
}
