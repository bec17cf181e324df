//! Who a machine is to others: a certificate with the machine's name, signed by one authority that
//! all machines trust. [`make`] writes a set of them; [`Identity`] is what one machine needs.
//!
//! A folder of keys holds `ca.pem` and, for each machine, `NAME.pem` and `NAME.key`. Only the
//! machine where [`make`] runs needs `ca.key`: who has that file can be any machine. The
//! certificates do not expire, so that machines with wrong clocks can connect. A machine that is
//! no longer trusted is taken from the list of names that an export allows, or all get new keys.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

/// The authority's name in its certificate. With its key it is all that is needed to sign more.
const AUTHORITY: &str = "Tombolo machines";

/// Why keys could not be made or used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum KeyError {
    /// Not a name of a machine.
    #[error(
        "\"{0}\" is not a valid machine name: expected 1 to 63 of a-z 0-9 and -, not at the beginning or end, such as \
         node-1"
    )]
    Name(String),
    /// A file.
    #[error("{what} {}: {source}", path.display())]
    File { what: &'static str, path: PathBuf, source: io::Error },
    /// Keys of that machine are there already.
    #[error("{} exists already; remove it to make new keys for {machine}, or choose another folder", path.display())]
    Exists { machine: String, path: PathBuf },
    /// `ca.pem` without its key, or the reverse.
    #[error(
        "{} is missing, but {} is there: expected both or neither; add machines where the first keys were made",
        missing.display(), there.display()
    )]
    Half { missing: PathBuf, there: PathBuf },
    /// Not what the file should hold.
    #[error("{}: expected {expected}: {why}", path.display())]
    Content { path: PathBuf, expected: &'static str, why: String },
    /// They do not belong together.
    #[error("the certificate {} and the key {} do not fit: {why}", certificate.display(), key.display())]
    Pair { certificate: PathBuf, key: PathBuf, why: String },
    /// The certificate names no machine.
    #[error("{}: the certificate names no machine: expected a subjectAltName of type DNS", .0.display())]
    Nameless(PathBuf),
    /// Making a key or certificate.
    #[error("making keys: {0}")]
    Make(String),
}

/// Whether a machine can have this name: that of one label of a DNS name.
pub fn is_machine_name(name: &str) -> bool {
    let fine = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=63).contains(&name.len()) && name.bytes().all(fine) && !name.starts_with('-') && !name.ends_with('-')
}

fn write(path: &Path, mode: u32, text: &str) -> Result<(), KeyError> {
    let failed = |source| KeyError::File { what: "writing", path: path.into(), source };
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path).map_err(failed)?;
    file.write_all(text.as_bytes()).map_err(failed)
}

fn made<T>(result: Result<T, rcgen::Error>) -> Result<T, KeyError> {
    result.map_err(|error| KeyError::Make(error.to_string()))
}

fn authority() -> Result<CertificateParams, KeyError> {
    let mut params = made(CertificateParams::new(Vec::new()))?;
    params.distinguished_name.push(DnType::CommonName, AUTHORITY);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok(params)
}

/// Writes keys for machines into a folder, which is made. The first call makes the authority; later
/// ones, with its `ca.key` there, add machines to it. Private keys are readable by their owner
/// only.
///
/// # Errors
/// [`KeyError`]. Nothing is overwritten.
pub fn make(folder: &Path, machines: &[String]) -> Result<(), KeyError> {
    if let Some(name) = machines.iter().find(|name| !is_machine_name(name)) {
        return Err(KeyError::Name(name.clone()));
    }
    let file = |name: &str| folder.join(name);
    for machine in machines {
        for path in [file(&format!("{machine}.pem")), file(&format!("{machine}.key"))] {
            // `ca` is a machine name too, whose files are the authority's.
            if machine == "ca" || path.exists() {
                return Err(KeyError::Exists { machine: machine.clone(), path });
            }
        }
    }
    fs::create_dir_all(folder).map_err(|source| KeyError::File { what: "making", path: folder.into(), source })?;
    let (certificate, key) = (file("ca.pem"), file("ca.key"));
    let signer = match (certificate.exists(), key.exists()) {
        (true, true) => {
            let text = fs::read_to_string(&key).map_err(|source| KeyError::File {
                what: "reading",
                path: key.clone(),
                source,
            })?;
            let content = |error: rcgen::Error| KeyError::Content {
                path: key.clone(),
                expected: "a private key in PEM",
                why: error.to_string(),
            };
            KeyPair::from_pem(&text).map_err(content)?
        }
        (false, false) => {
            let signer = made(KeyPair::generate())?;
            write(&key, 0o600, &signer.serialize_pem())?;
            write(&certificate, 0o644, &made(authority()?.self_signed(&signer))?.pem())?;
            signer
        }
        (true, false) => return Err(KeyError::Half { missing: key, there: certificate }),
        (false, true) => return Err(KeyError::Half { missing: certificate, there: key }),
    };
    let issuer = Issuer::new(authority()?, signer);
    for machine in machines {
        let own = made(KeyPair::generate())?;
        let mut params = made(CertificateParams::new(vec![machine.clone()]))?;
        params.distinguished_name.push(DnType::CommonName, machine.as_str());
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        write(&file(&format!("{machine}.key")), 0o600, &own.serialize_pem())?;
        write(&file(&format!("{machine}.pem")), 0o644, &made(params.signed_by(&own, &issuer))?.pem())?;
    }
    Ok(())
}

/// The files of one machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyFiles {
    /// The authority's certificate, PEM.
    pub ca: PathBuf,
    /// This machine's certificate, PEM; then those between it and the authority, if any.
    pub certificate: PathBuf,
    /// Its private key, PEM.
    pub key: PathBuf,
}

impl KeyFiles {
    /// Those that [`make`] wrote for a machine.
    pub fn of(folder: &Path, machine: &str) -> KeyFiles {
        KeyFiles {
            ca: folder.join("ca.pem"),
            certificate: folder.join(format!("{machine}.pem")),
            key: folder.join(format!("{machine}.key")),
        }
    }
}

/// What one machine needs to connect to others, and to be connected to. TLS 1.3, both sides prove
/// who they are.
#[derive(Clone)]
pub struct Identity {
    name: String,
    pub(super) client: Arc<ClientConfig>,
    pub(super) server: Arc<ServerConfig>,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The names of a certificate that are machines' names.
pub(super) fn names(certificate: &CertificateDer<'_>) -> Vec<String> {
    let parsed = webpki::EndEntityCert::try_from(certificate);
    parsed.map(|certificate| certificate.valid_dns_names().map(str::to_string).collect()).unwrap_or_default()
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, KeyError> {
    let bytes = fs::read(path).map_err(|source| KeyError::File { what: "reading", path: path.into(), source })?;
    let content =
        |why: String| KeyError::Content { path: path.into(), expected: "one or more certificates in PEM", why };
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let found = found.map_err(|error| content(error.to_string()))?;
    if found.is_empty() { Err(content("found none".into())) } else { Ok(found) }
}

impl Identity {
    /// Reads a machine's files.
    ///
    /// # Errors
    /// [`KeyError`].
    pub fn load(files: &KeyFiles) -> Result<Identity, KeyError> {
        let KeyFiles { ca, certificate, key } = files;
        let mut roots = RootCertStore::empty();
        for root in certificates(ca)? {
            let content = |error: rustls::Error| KeyError::Content {
                path: ca.clone(),
                expected: "the certificate of an authority",
                why: error.to_string(),
            };
            roots.add(root).map_err(content)?;
        }
        let roots = Arc::new(roots);
        let chain = certificates(certificate)?;
        let name = names(&chain[0]).into_iter().next().ok_or_else(|| KeyError::Nameless(certificate.clone()))?;
        let bytes = fs::read(key).map_err(|source| KeyError::File { what: "reading", path: key.clone(), source })?;
        let private = PrivateKeyDer::from_pem_slice(&bytes).map_err(|error| KeyError::Content {
            path: key.clone(),
            expected: "a private key in PEM",
            why: error.to_string(),
        })?;
        let pair = |error: rustls::Error| KeyError::Pair {
            certificate: certificate.clone(),
            key: key.clone(),
            why: error.to_string(),
        };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let make = |error: rustls::Error| KeyError::Make(error.to_string());
        let mut client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(make)?
            .with_root_certificates(roots.clone())
            .with_client_auth_cert(chain.clone(), private.clone_key())
            .map_err(pair)?;
        // Connections are few and long: nothing is gained by resuming one.
        client.resumption = rustls::client::Resumption::disabled();
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
            .build()
            .map_err(|error| KeyError::Make(error.to_string()))?;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(make)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, private)
            .map_err(pair)?;
        server.send_tls13_tickets = 0;
        Ok(Identity { name, client: Arc::new(client), server: Arc::new(server) })
    }

    /// The machine's name: the first in its certificate.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// A machine's name, as TLS wants it.
pub(super) fn server_name(machine: &str) -> Result<ServerName<'static>, KeyError> {
    let name = Some(machine).filter(|name| is_machine_name(name)).map(str::to_string);
    let name = name.and_then(|name| ServerName::try_from(name).ok());
    name.ok_or_else(|| KeyError::Name(machine.into()))
}
