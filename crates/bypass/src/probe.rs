//! Whether the bypass can be on this machine, and what this kernel lacks: found out by loading the
//! programs and asking tcx, without attaching anything.

use crate::hook::has_tcx;
use crate::maps;
use crate::object::{self, LoadError};
use crate::place::Place;

/// From which kernel on a part is whole, and what is without it. That, unlike the rest, cannot be
/// asked.
const LIMITS: [((u32, u32), &str); 2] = [
    ((5, 14), "this kernel is not tested: RHEL's 5.14 is the oldest that runs the tests"),
    ((6, 17), "a change of firewall rules that is undone at once may be noticed after the lease only"),
];
const NO_TCX: &str = "no tcx (Linux 6.6): mode tcx works by filters behind a clsact qdisc, which others can remove";
const NO_POINTERS: &str = "no typed pointers (Linux 6.2): each frame costs more helper calls";
const NO_IPV6: &str = "translated IPv6 takes the kernel's path in mode tcx (Linux 6.16, or its fix)";

/// Why there can be no bypass.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// Nothing can be tried.
    #[error("not tried: not root")]
    NotRoot,
    /// The programs.
    #[error(transparent)]
    Load(#[from] LoadError),
}

/// What there can be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// As `uname -r` says.
    pub release: String,
    /// Where the programs of mode tcx are attached: "tcx" or "clsact".
    pub hook: &'static str,
    /// What this kernel cannot, though the rest works.
    pub limits: Vec<&'static str>,
}

/// Loads the programs of both modes into the kernel, lets them go again, and asks tcx at the
/// loopback interface.
pub fn probe() -> Result<Found, ProbeError> {
    if !rustix::process::geteuid().is_root() {
        return Err(ProbeError::NotRoot);
    }
    let loaded = object::load()?;
    let hook = if has_tcx() { "tcx" } else { "clsact" };
    let limits = limits(&release(), Can::ask(!maps::are_of_old(&loaded)));
    Ok(Found { release: release(), hook, limits })
}

/// What the kernel cannot of what is attached in a place.
pub(crate) fn limits_of(place: &Place) -> Vec<&'static str> {
    limits(&release(), Can::ask(!maps::are_of_old_in(place)))
}

fn release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// What a kernel said that it can.
#[derive(Clone, Copy)]
struct Can {
    tcx: bool,
    pointers: bool,
    /// Translate IPv6; `None` if it was not asked.
    ipv6: Option<bool>,
}

impl Can {
    fn ask(pointers: bool) -> Can {
        Can { tcx: has_tcx(), pointers, ipv6: object::translates_ipv6() }
    }
}

fn limits(release: &str, can: Can) -> Vec<&'static str> {
    let mut numbers = release.split(['.', '-']).map(|n| n.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let ipv6 = can.ipv6.unwrap_or(version >= (6, 16));
    let all = [(can.tcx, NO_TCX), (can.pointers, NO_POINTERS), (ipv6, NO_IPV6)];
    let missing = all.into_iter().filter(|m| !m.0).map(|m| m.1);
    missing.chain(LIMITS.iter().filter(|(since, _)| version < *since).map(|(_, what)| *what)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_kernels_have_limits_and_newer_ones_none() {
        let all = Can { tcx: true, pointers: true, ipv6: None };
        let limits = |release| super::limits(release, all);
        assert_eq!(limits("6.8.0-45-generic").len(), 2);
        assert_eq!(limits("6.16.3").len(), 1);
        assert_eq!((limits("6.17.0-rc1"), limits("7.0.1")), (vec![], vec![]));
        // What the kernel says of IPv6 goes before what its version tells.
        assert_eq!(super::limits("6.8.0-45-generic", Can { ipv6: Some(true), ..all }).len(), 1);
        assert_eq!(super::limits("6.17.0", Can { ipv6: Some(false), ..all }), [NO_IPV6]);
        let none = Can { tcx: false, pointers: false, ipv6: Some(false) };
        let old = super::limits("6.1.0-56-amd64", none);
        assert!(old.len() == 4 && old[0].contains("clsact") && old[1].contains("typed pointers"), "{old:?}");
        let untested = super::limits("5.10.0-30-amd64", none);
        assert!(untested.len() == 5 && untested[3].contains("not tested"), "{untested:?}");
    }

    #[test]
    fn this_kernel_is_judged_as_loading_judges_it() {
        match (probe(), object::load()) {
            (Err(ProbeError::NotRoot), _) => tombolo_testing::skip("loading eBPF programs needs root"),
            (Ok(found), Ok(_)) => {
                assert!(!found.release.is_empty());
                // Asked of the kernel, which answers where programs can be loaded.
                let is_lacking = found.limits.contains(&NO_IPV6);
                assert_eq!(object::translates_ipv6(), Some(!is_lacking), "{found:?}");
            }
            (Err(ProbeError::Load(_)), Err(_)) => {}
            (probe, load) => panic!("{probe:?}, but loading gave {:?}", load.map(drop)),
        }
    }
}
