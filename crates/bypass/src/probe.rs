//! Whether the bypass can be on this machine: found out by loading the programs and asking tcx, without attaching anything.

use crate::object::{self, LoadError, chain};
use aya::programs::{SchedClassifier, TcAttachType};

/// From which kernel on a part is whole, and what is without it. The kernels that lack the rest of it are refused by `probe`.
const LIMITS: [((u32, u32), &str); 2] = [
    ((6, 16), "translated IPv6 goes the kernel's way in mode tcx"),
    ((6, 17), "a change of firewall rules that is undone at once may be noticed after the lease only"),
];

/// Why there can be no bypass.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// Nothing can be tried.
    #[error("not tried: not root")]
    NotRoot,
    /// The programs.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The hook.
    #[error("this kernel has no tcx ({0}), which came with Linux 6.6")]
    NoTcx(String),
}

/// What there can be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The kernel's release.
    pub release: String,
    /// What this kernel cannot, though the rest works.
    pub limits: Vec<&'static str>,
}

/// Loads the programs of both modes into the kernel, lets them go again, and asks tcx at the loopback interface.
pub fn probe() -> Result<Found, ProbeError> {
    if !rustix::process::geteuid().is_root() {
        return Err(ProbeError::NotRoot);
    }
    object::load()?;
    SchedClassifier::query_tcx("lo", TcAttachType::Ingress).map_err(|e| ProbeError::NoTcx(chain(&e)))?;
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    Ok(Found { limits: limits(&release), release })
}

fn limits(release: &str) -> Vec<&'static str> {
    let mut numbers = release.split(['.', '-']).map(|n| n.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    LIMITS.iter().filter(|(since, _)| version < *since).map(|(_, what)| *what).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_kernels_have_limits_and_newer_ones_none() {
        assert_eq!(limits("6.8.0-45-generic").len(), 2);
        assert_eq!(limits("6.16.3").len(), 1);
        assert_eq!((limits("6.17.0-rc1"), limits("7.0.1")), (vec![], vec![]));
    }

    #[test]
    fn this_kernel_is_judged_as_loading_judges_it() {
        match (probe(), object::load()) {
            (Err(ProbeError::NotRoot), _) => println!("SKIP: loading eBPF programs needs root"),
            (Ok(found), Ok(_)) => assert!(!found.release.is_empty()),
            (Err(ProbeError::Load(_)), Err(_)) => {}
            (probe, load) => panic!("{probe:?}, but loading gave {:?}", load.map(drop)),
        }
    }
}
