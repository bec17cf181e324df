//! Network boot: which file a client is told to load, over DHCP (next-server, options 66 and 67)
//! and DHCPv6 (option 59).
//!
//! A client says what it is: its architecture (option 93 of RFC 4578, 61 of RFC 5970), that it is
//! iPXE (user class), that it takes a URL (vendor class "HTTPClient", UEFI 2.10 §24.7). The answer
//! is chosen in this order:
//!
//! 1. the file for iPXE, if the client is iPXE;
//! 2. that of the first of its architectures that has one;
//! 3. the file for all, for an HTTP client only if it is a URL that it can load.
//!
//! So firmware loads iPXE, iPXE loads what comes next, and neither loads the other in a loop.

use crate::frame::Mac;
use std::collections::HashMap;
use std::net::Ipv4Addr;

/// Longest name of a file, or URL: one option of DHCP.
pub const MAX_BOOT_BYTES: usize = 255;
/// Longest that fits the field `file` of a DHCP message with the NUL behind it; a longer one is in
/// option 67 only.
pub(super) const FIELD_BYTES: usize = 127;
/// Architectures that a client may list.
pub(super) const MAX_ARCHITECTURES: usize = 8;
/// The vendor class of clients that boot by HTTP; they take an answer only with this class in it.
pub(super) const HTTP_CLIENT: &[u8] = b"HTTPClient";
/// The user class by which iPXE is known.
const IPXE: &[u8] = b"iPXE";
/// UEFI on x86-64, and the number that some firmware of that kind gives instead (an erratum of RFC
/// 4578 swapped them).
const X64_UEFI: u16 = 7;
const X64_UEFI_SWAPPED: u16 = 9;

/// Architectures by their names in the fabric file (IANA, Processor Architecture Types).
pub const ARCHITECTURES: [(&str, u16); 15] = [
    ("x86-bios", 0),
    ("x86-uefi", 6),
    ("x86-64-uefi", X64_UEFI),
    ("arm-uefi", 10),
    ("arm64-uefi", 11),
    ("x86-uefi-http", 15),
    ("x86-64-uefi-http", 16),
    ("arm-uefi-http", 18),
    ("arm64-uefi-http", 19),
    ("x86-bios-http", 20),
    ("arm-uboot", 21),
    ("arm64-uboot", 22),
    ("riscv64-uefi", 27),
    ("riscv64-uefi-http", 28),
    ("loongarch64-uefi", 39),
];

/// What members boot from the network. Texts are at most [`MAX_BOOT_BYTES`] long; longer ones are
/// left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BootConfig {
    /// The TFTP server of files that are no URLs (next-server, option 66).
    pub server: Option<Ipv4Addr>,
    /// What a client loads over IPv4 that nothing below is for.
    pub file: Option<String>,
    /// What clients of an architecture load.
    pub architectures: Vec<(u16, String)>,
    /// What iPXE loads.
    pub ipxe: Option<String>,
    /// The URL for clients over IPv6.
    pub url6: Option<String>,
    /// URLs by architecture over IPv6.
    pub architectures6: Vec<(u16, String)>,
    /// What iPXE loads over IPv6.
    pub ipxe6: Option<String>,
}

/// The settings of a network, and those of members that have their own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BootTable {
    /// For every client that is not listed.
    pub all: Option<BootConfig>,
    /// By MAC address.
    pub of: HashMap<Mac, BootConfig>,
}

impl BootTable {
    pub(super) fn find(&self, mac: Mac) -> Option<&BootConfig> {
        self.of.get(&mac).or(self.all.as_ref())
    }
}

/// What a client said about its boot. The default: nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct BootClient {
    pub(super) architectures: Vec<u16>,
    pub(super) ipxe: bool,
    pub(super) http: bool,
    /// It asks for the option that names the file.
    pub(super) asks: bool,
}

impl BootClient {
    /// Reads a list of architectures: 16 bits each.
    pub(super) fn read_architectures(&mut self, data: &[u8]) {
        let all = data.as_chunks::<2>().0.iter().map(|pair| u16::from_be_bytes(*pair));
        self.architectures = all.take(MAX_ARCHITECTURES).collect();
    }

    /// Reads a vendor class, like "PXEClient:Arch:00007:UNDI:003016".
    pub(super) fn read_vendor_class(&mut self, data: &[u8]) {
        self.http = data.starts_with(HTTP_CLIENT);
        self.asks |= self.http || data.starts_with(b"PXEClient");
    }

    /// Reads a user class of DHCP: a text alone, as iPXE has it, or texts with a byte of length
    /// each (RFC 3004).
    pub(super) fn read_user_class(&mut self, data: &[u8]) {
        let mut rest = data;
        self.ipxe |= data == IPXE;
        while let Some((length, after)) = rest.split_first() {
            let Some((text, after)) = after.split_at_checked(usize::from(*length)) else { return };
            self.ipxe |= text == IPXE;
            rest = after;
        }
    }

    /// Reads a user class of DHCPv6: texts with 16 bits of length each.
    pub(super) fn read_user_class6(&mut self, data: &[u8]) {
        let mut rest = data;
        while let Some((length, after)) = rest.split_first_chunk::<2>() {
            let Some((text, after)) = after.split_at_checked(usize::from(u16::from_be_bytes(*length))) else { return };
            self.ipxe |= text == IPXE;
            rest = after;
        }
    }

    fn choose<'a>(
        &self,
        ipxe: &'a Option<String>,
        by_architecture: &'a [(u16, String)],
        all: &'a Option<String>,
    ) -> Option<&'a str> {
        let entry = |number: u16| by_architecture.iter().find(|(n, _)| *n == number).map(|(_, file)| file);
        let swapped = |number| if number == X64_UEFI_SWAPPED { entry(X64_UEFI) } else { None };
        let own = || self.architectures.iter().find_map(|n| entry(*n).or_else(|| swapped(*n)));
        let all = all.as_ref().filter(|file| !self.http || is_http(file));
        let found = ipxe.as_ref().filter(|_| self.ipxe).or_else(own).or(all)?;
        (found.len() <= MAX_BOOT_BYTES).then_some(found.as_str())
    }

    /// The file or URL for this client over IPv4.
    pub(super) fn file<'a>(&self, config: &'a BootConfig) -> Option<&'a str> {
        self.choose(&config.ipxe, &config.architectures, &config.file)
    }

    /// The URL for this client over IPv6.
    pub(super) fn url6<'a>(&self, config: &'a BootConfig) -> Option<&'a str> {
        self.choose(&config.ipxe6, &config.architectures6, &config.url6)
    }
}

fn is_http(file: &str) -> bool {
    file.starts_with("http://") || file.starts_with("https://")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> BootConfig {
        BootConfig {
            server: Some(Ipv4Addr::new(10, 0, 0, 5)),
            file: Some("undionly.kpxe".into()),
            architectures: vec![(7, "ipxe.efi".into()), (16, "http://10.0.0.5/ipxe.efi".into())],
            ipxe: Some("http://10.0.0.5/start".into()),
            url6: Some("tftp://[fd00::5]/ipxe.efi".into()),
            architectures6: vec![(0, "tftp://[fd00::5]/undionly.kpxe".into())],
            ipxe6: None,
        }
    }

    fn client(architectures: &[u16]) -> BootClient {
        BootClient { architectures: architectures.to_vec(), ..BootClient::default() }
    }

    #[test]
    fn the_file_is_that_of_ipxe_then_of_the_architecture_then_of_all() {
        let config = config();
        assert_eq!(client(&[]).file(&config), Some("undionly.kpxe"));
        assert_eq!(client(&[0]).file(&config), Some("undionly.kpxe"));
        assert_eq!(client(&[7]).file(&config), Some("ipxe.efi"));
        assert_eq!(client(&[9]).file(&config), Some("ipxe.efi"), "the other number of the same firmware");
        assert_eq!(client(&[3, 7]).file(&config), Some("ipxe.efi"));
        for known in [&[][..], &[0], &[7]] {
            let ipxe = BootClient { ipxe: true, ..client(known) };
            assert_eq!(ipxe.file(&config), Some("http://10.0.0.5/start"), "no loop");
            assert_eq!(ipxe.url6(&config), client(known).url6(&config));
        }
        assert_eq!(client(&[0]).url6(&config), Some("tftp://[fd00::5]/undionly.kpxe"));
        assert_eq!(client(&[7]).url6(&config), Some("tftp://[fd00::5]/ipxe.efi"));
        assert_eq!(client(&[7]).file(&BootConfig::default()), None);
        let long = BootConfig { file: Some("x".repeat(256)), ..BootConfig::default() };
        assert_eq!(client(&[]).file(&long), None);
    }

    #[test]
    fn an_http_client_gets_a_url_or_nothing() {
        let http = |architectures: &[u16]| BootClient { http: true, ..client(architectures) };
        assert_eq!(http(&[16]).file(&config()), Some("http://10.0.0.5/ipxe.efi"));
        assert_eq!(http(&[19]).file(&config()), None, "no name of a file");
        let url = BootConfig { file: Some("https://10.0.0.5/x".into()), ..BootConfig::default() };
        assert_eq!(http(&[19]).file(&url), Some("https://10.0.0.5/x"));
    }

    #[test]
    fn what_clients_say_is_read_and_bounded() {
        let mut read = BootClient::default();
        read.read_architectures(&[0, 7, 0, 9, 1]);
        assert_eq!(read.architectures, [7, 9], "half of a number is none");
        read.read_architectures(&[0; 200]);
        assert_eq!(read.architectures.len(), MAX_ARCHITECTURES);
        read.read_vendor_class(b"PXEClient:Arch:00007:UNDI:003016");
        assert!(read.asks && !read.http);
        read.read_vendor_class(b"HTTPClient:Arch:00016");
        assert!(read.http);
        for (class, ipxe) in [
            (&b"iPXE"[..], true),
            (b"\x04iPXE", true),
            (b"\x03abc\x04iPXE", true),
            (b"", false),
            (b"iPXE2", false),
            (b"\x09iPXE", false),
            (b"\x00\x00\x00", false),
        ] {
            let mut read = BootClient::default();
            read.read_user_class(class);
            assert_eq!(read.ipxe, ipxe, "{class:?}");
        }
        for (class, ipxe) in
            [(&b"\0\x04iPXE"[..], true), (b"\0\x01a\0\x04iPXE", true), (b"iPXE", false), (b"\xff\xffiPXE", false)]
        {
            let mut read = BootClient::default();
            read.read_user_class6(class);
            assert_eq!(read.ipxe, ipxe, "{class:?}");
        }
    }
}
