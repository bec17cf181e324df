//! The commands: what is made in the container's namespace and in the fabric, and taken out again.
//!
//! # Order
//! Calls for one attachment come one after the other ([`Fabric::turn`]). An ADD whose runtime has
//! ended while it waited for its turn does nothing ([`Caller`]): DEL may have come first, and no
//! other one would follow. ADD makes a persistent tap in the namespace first, then has the fabric
//! attach to it, then adds the route. So at each step what is left after a kill is in the
//! namespace, and ends with it. DEL removes the port first: the daemon's descriptor would keep the
//! namespace alive.
//!
//! A virtual machine that reaches the fabric by a vhost-user socket has nothing in the namespace.
//! ADD adds the port, then writes the file for Kata ([`dan`]); DEL removes the port, the file and
//! the socket.
//!
//! # Names
//! The fabric knows an attachment by the container's ID and CNI_IFNAME, as GC's list does, and MAC
//! addresses follow from these. The device of a microVM may have another name, of which only ADD is
//! sure to be told. So the other commands find the device by its MAC address.
//!
//! # The daemon is away
//! A persistent tap stays, without carrier, and the next daemon attaches to it again. DEL deletes
//! the tap itself; the next daemon finds none and forgets the port.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use serde_json::{Value, json};
use tombolo_host::api::report::{ForwardReport, NetworkReport};
use tombolo_host::file::Mac;
use tombolo_port::link::{Interface, LinkError, Netns};
use tombolo_port::tap::{self, TapConfig};

use crate::caller::Caller;
use crate::dan;
use crate::error::CniError;
use crate::fabric::{Device, Fabric, Form, Place, mac_of, member_name, plain_name};
use crate::request::{Command, Config, Environment, VERSIONS, Vm, is_path};

fn system(error: impl std::fmt::Display) -> CniError {
    CniError::System(error.to_string())
}

/// Carries out a command. What it returns goes to standard output.
pub(crate) fn run(
    command: Command,
    environment: &Environment,
    config: &Config,
    caller: &Caller,
) -> Result<Option<Value>, CniError> {
    let since = |command, since| match config.is_at_least(since) {
        true => Ok(()),
        false => Err(CniError::TooOld { command, since, found: config.version.into() }),
    };
    match command {
        Command::Add => add(environment, config, caller).map(Some),
        Command::Del => del(environment, config).map(|()| None),
        Command::Check => {
            since("CHECK", "0.4.0")?;
            check(environment, config).map(|()| None)
        }
        Command::Status => {
            since("STATUS", "1.1.0")?;
            status(config).map(|()| None)
        }
        Command::Gc => {
            since("GC", "1.1.0")?;
            gc(config).map(|()| None)
        }
        Command::Version => Ok(Some(versions(config.version))),
    }
}

/// The answer to VERSION.
pub(crate) fn versions(version: &str) -> Value {
    json!({ "cniVersion": version, "supportedVersions": VERSIONS })
}

/// Deletes the container's interface if it is one that this plugin made.
fn delete_device(netns: &Netns, interface: &str, mac: Mac) -> Result<(), CniError> {
    Interface::delete_own(netns, interface, mac.0).map(drop).map_err(system)
}

/// The name of the interface of the namespace with this MAC address, if there is one.
fn named(netns: &Netns, mac: Mac) -> Result<Option<String>, CniError> {
    // It shows the namespace of the thread that looks. Two lines of headings, then `NAME: NUMBERS`.
    let list = netns.run(|| std::fs::read_to_string("/proc/thread-self/net/dev")).map_err(system)?.map_err(system)?;
    let names = list.lines().skip(2).filter_map(|line| Some(line.split_once(':')?.0.trim()));
    for name in names {
        match Interface::open(Some(netns), name).and_then(|link| link.mac()) {
            Ok(found) if found == mac.0 => return Ok(Some(name.into())),
            Ok(_) | Err(LinkError::Absent { .. }) => {}
            Err(error) => return Err(system(error)),
        }
    }
    Ok(None)
}

/// The name of the container's device: that of the interface, but for a microVM's tap.
fn device_name(netns: &Netns, interface: &str, config: &Config, mac: Mac) -> Result<String, CniError> {
    let found = if config.vm == Some(Vm::Tap) { named(netns, mac)? } else { None };
    Ok(found.unwrap_or_else(|| interface.into()))
}

/// The number that an argument names, as the jailer's user.
fn id(environment: &Environment, key: &'static str) -> Result<Option<u32>, CniError> {
    let number = |text: &str| {
        text.parse().map_err(|_| CniError::Environment {
            name: "CNI_ARGS",
            what: format!("{key}: expected the number of a user or group, found {:?}", crate::request::short(text)),
        })
    };
    environment.arg(key).map(number).transpose()
}

/// The address of the device itself. In a container it is the container's. A microVM's is its
/// guest's, so its tap has another. Behind a vhost-user socket there is no device but the guest's.
fn device_mac(config: &Config, identity: &str) -> Mac {
    match config.vm {
        Some(Vm::Tap) => Mac::derived(&["cni tap", &config.fabric, identity]),
        Some(Vm::VhostUser) | None => mac_of(config, identity),
    }
}

/// Smallest MTU with which an interface has IPv6 (RFC 8200, section 5).
const IPV6_MTU: u32 = 1280;

/// Whether an interface of the namespace can have IPv6 addresses: not where the kernel runs without
/// IPv6.
fn has_ipv6(netns: &Netns, mtu: u32) -> Result<bool, CniError> {
    let is_there = netns.run(|| std::path::Path::new("/proc/sys/net/ipv6").exists()).map_err(system)?;
    Ok(is_there && mtu >= IPV6_MTU)
}

/// Turns IPv6 of an interface on or off. A runtime may have it off by default, for networks that
/// have none. It is off for a microVM's tap: the namespace has no part in what the guest says.
fn set_ipv6(netns: &Netns, interface: &str, on: bool) -> Result<(), CniError> {
    let file = format!("/proc/sys/net/ipv6/conf/{interface}/disable_ipv6");
    let disable = if on { "0" } else { "1" };
    match netns.run(|| std::fs::write(&file, disable)).map_err(system)? {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(system(format!("{file}: {error}"))),
        _ => Ok(()),
    }
}

/// Has the interface, which is down, form its link-local address from its MAC address. The kernel
/// may be set to form a random one (`addr_gen_mode` 2 or 3), which the fabric's guard drops.
fn form_from_mac(netns: &Netns, interface: &str) -> Result<(), CniError> {
    let file = format!("/proc/sys/net/ipv6/conf/{interface}/addr_gen_mode");
    let set = || match std::fs::read_to_string(&file) {
        Ok(mode) if matches!(mode.trim(), "2" | "3") => std::fs::write(&file, "0"),
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    };
    netns.run(set).map_err(system)?.map_err(|error| system(format!("{file}: {error}")))
}

/// The routers of an interface's default routes.
type Routers = (Option<Ipv4Addr>, Option<Ipv6Addr>);

/// The routers that the network has for an interface.
fn routers_of(place: &Place) -> Routers {
    (place.router, place.six.and_then(|six| six.router))
}

/// Gives the interface its default routes and its IPv6 address. The IPv4 address is there from the
/// fabric. The IPv6 address is usable at once: duplicate address detection is off for it, since the
/// fabric's guard lets no other member use it.
///
/// Returns the routers of the routes that it made: a container that has a default route by another
/// interface keeps that one.
fn configure(netns: &Netns, interface: &str, place: &Place) -> Result<Routers, CniError> {
    let link = Interface::open(Some(netns), interface).map_err(system)?;
    let add = |any: IpAddr, router: IpAddr| link.add_route((any, 0), Some(router)).map_err(system);
    let (mut router, mut router6) = routers_of(place);
    if let Some(ip) = router {
        router = add(Ipv4Addr::UNSPECIFIED.into(), ip.into())?.then_some(ip);
    }
    if let Some(six) = place.six {
        set_ipv6(netns, interface, true)?;
        link.add_address(six.ip.into(), 64).map_err(system)?;
    }
    if let Some(ip6) = router6 {
        router6 = add(Ipv6Addr::UNSPECIFIED.into(), ip6.into())?.then_some(ip6);
    }
    Ok((router, router6))
}

/// Opens the container's namespace.
///
/// # Errors
/// It is that of this program: a container with the host's network has no interface of its own.
fn open_container(path: &str) -> Result<Netns, CniError> {
    let netns = Netns::open(path).map_err(system)?;
    if netns.is_here().map_err(system)? {
        let what = format!("expected the network namespace of a container, found that of the host at {path:?}");
        return Err(CniError::Environment { name: "CNI_NETNS", what });
    }
    Ok(netns)
}

fn add(environment: &Environment, config: &Config, caller: &Caller) -> Result<Value, CniError> {
    let config = &config.with_args(environment)?;
    let (container, interface, path) = (environment.container()?, environment.interface()?, environment.need_netns()?);
    let name = environment.device(config.vm)?;
    if config.prev_result.is_some() {
        let what = "prevResult: this plugin makes the container's interface, so it has to be the first of the list";
        return Err(CniError::Config(what.into()));
    }
    let identity = config.identity(container, interface);
    let mac = mac_of(config, &identity);
    let fabric = Fabric::new(config)?;
    // Without a daemon or its network there is nothing to wait for.
    fabric.network(&fabric.status()?)?;
    let _turn = fabric.turn(mac)?;
    // While this call waited, its runtime may have ended, DEL may have come for the same
    // attachment, and the fabric may have changed. So everything is looked at from here on.
    caller.check()?;
    let netns = open_container(path)?;
    let status = fabric.status()?;
    let mtu = fabric.network(&status)?.mtu;
    let has_ipv6 = match config.vm {
        // The guest of a monitor configures IPv6 itself: firecracker-go-sdk takes results with one
        // address only.
        Some(Vm::Tap) => false,
        Some(Vm::VhostUser) => mtu >= IPV6_MTU,
        None => has_ipv6(&netns, mtu)?,
    };
    if let Some(ip6) = config.ip6.filter(|_| !has_ipv6) {
        let what = format!("no IPv6 address: the kernel has no IPv6, or the MTU {mtu} is below {IPV6_MTU}");
        return Err(CniError::Config(format!("runtimeConfig.ips: expected {what}, found {ip6}")));
    }
    // What a call that was killed has left.
    for stale in fabric.containers(&status).iter().filter(|found| found.container == identity) {
        fabric.remove(&stale.name)?;
    }
    let pod = environment.arg("K8S_POD_NAME").and_then(member_name);
    let names: Vec<String> = pod.into_iter().chain(member_name(container)).chain([plain_name(mac)]).collect();
    if config.vm == Some(Vm::VhostUser) {
        return add_vhost_user(&fabric, config, (container, interface, path), (&identity, mac, has_ipv6), &names);
    }
    let own = device_mac(config, &identity);
    delete_device(&netns, &device_name(&netns, interface, config, own)?, own)?;
    if Interface::open(Some(&netns), name).is_ok() {
        let what = format!("the container has an interface \"{name}\" already; choose another name for this one");
        return Err(CniError::Environment { name: "CNI_IFNAME", what });
    }
    let is_monitored = config.vm.is_some();
    let device = TapConfig {
        netns: Some(netns.clone()),
        mtu: Some(mtu),
        mac: Some(own.0),
        owner: id(environment, "TC_REDIRECT_TAP_UID")?.filter(|_| is_monitored),
        group: id(environment, "TC_REDIRECT_TAP_GID")?.filter(|_| is_monitored),
        persist: true,
        closed: true,
        ..TapConfig::new(name)
    };
    tap::make(&device).map_err(system)?;
    let made = (|| {
        if is_monitored {
            set_ipv6(&netns, name, false)?;
        } else {
            form_from_mac(&netns, name)?;
        }
        let form = Form::Tap { interface: name, monitor: is_monitored };
        let device = Device { identity: &identity, netns: path, mac, form, has_ipv6 };
        let (member, place) = fabric.join(&device, &names)?;
        // A guest's kernel has it from its monitor.
        let configured = if is_monitored { Ok(routers_of(&place)) } else { configure(&netns, name, &place) };
        match configured {
            Ok(routers) => Ok((place, routers)),
            Err(error) => {
                // The first error is what matters.
                let _ = fabric.remove(&member);
                Err(error)
            }
        }
    })();
    match made {
        Ok((place, routers)) => Ok(result(config, (container, name, path), (own, mac), &place, routers, None)),
        Err(error) => {
            // The first error is what matters.
            let _ = delete_device(&netns, name, own);
            Err(error)
        }
    }
}

/// Adds the port of a virtual machine that reaches the fabric by a vhost-user socket.
///
/// Kata's monitor listens at the socket, and takes a path only at which there is nothing yet. So
/// the fabric connects there, and the path is made free. Other monitors connect to the fabric.
fn add_vhost_user(
    fabric: &Fabric<'_>,
    config: &Config,
    at: (&str, &str, &str),
    (identity, mac, has_ipv6): (&str, Mac, bool),
    names: &[String],
) -> Result<Value, CniError> {
    let (container, interface, path) = at;
    let socket = fabric.socket(mac);
    // The path's folder is that of the configuration.
    let text = socket.to_str().filter(|_| is_path(&socket)).ok_or_else(|| {
        let what = format!("runtime: expected an absolute path of printable characters, found {socket:?}");
        CniError::Config(what)
    })?;
    forget_vm(config, &socket, container, interface)?;
    let form = Form::VhostUser { socket: text, connect: config.dan.is_some() };
    let (name, place) = fabric.join(&Device { identity, netns: path, mac, form, has_ipv6 }, names)?;
    if let Some(folder) = &config.dan
        && let Err(error) = dan::put(folder, container, dan::device(interface, mac, text, &place))
    {
        // The first error is what matters.
        let _ = fabric.remove(&name);
        return Err(error);
    }
    Ok(result(config, at, (mac, mac), &place, routers_of(&place), Some(text)))
}

/// Removes what there is of a virtual machine besides its port: the entry in Kata's file, and the
/// socket.
fn forget_vm(config: &Config, socket: &Path, container: &str, interface: &str) -> Result<(), CniError> {
    if let Some(folder) = &config.dan {
        dan::take(folder, container, interface)?;
    }
    match std::fs::symlink_metadata(socket) {
        // A monitor's. The fabric removes its own.
        Ok(found) if found.file_type().is_socket() => match std::fs::remove_file(socket) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(system(format!("{}: {error}", socket.display())))
            }
            _ => Ok(()),
        },
        _ => Ok(()),
    }
}

/// What ADD answers, in the version of the configuration.
///
/// For a microVM it has the pair that firecracker-go-sdk looks for: the tap, and the guest's
/// interface, which has the tap's name and the container's ID in place of a namespace. The address
/// is the guest's. Behind a `socket` there is the guest's interface alone. The default routes are
/// those by `routers`.
fn result(
    config: &Config,
    at: (&str, &str, &str),
    (own, mac): (Mac, Mac),
    place: &Place,
    routers: Routers,
    socket: Option<&str>,
) -> Value {
    let (container, interface, path) = at;
    let is_pair = config.vm == Some(Vm::Tap);
    let sandbox = if socket.is_some() { container } else { path };
    let mut device = json!({ "name": interface, "mac": own.to_string(), "sandbox": sandbox });
    if config.is_at_least("1.1.0") {
        device["mtu"] = place.mtu.into();
        if let Some(socket) = socket {
            device["socketPath"] = socket.into();
        }
    }
    let ip_of = |ip: IpAddr, prefix: u8, router: Option<IpAddr>| {
        let mut entry = json!({ "address": format!("{ip}/{prefix}"), "interface": u8::from(is_pair) });
        if let Some(router) = router {
            entry["gateway"] = router.to_string().into();
        }
        if !config.is_at_least("1.0.0") {
            entry["version"] = if ip.is_ipv4() { "4" } else { "6" }.into();
        }
        entry
    };
    let (router, router6) = (place.router.map(IpAddr::from), place.six.and_then(|six| six.router).map(IpAddr::from));
    let ip = ip_of(place.ip.into(), place.prefix, router);
    let ips: Vec<Value> = [ip].into_iter().chain(place.six.map(|six| ip_of(six.ip.into(), 64, router6))).collect();
    let routes = [("0.0.0.0/0", routers.0.map(IpAddr::from)), ("::/0", routers.1.map(IpAddr::from))].into_iter();
    let routes = routes.filter_map(|(to, router)| Some(json!({ "dst": to, "gw": router?.to_string() })));
    let nameservers = place.nameserver.map(IpAddr::from).into_iter();
    let nameservers = nameservers.chain(place.six.and_then(|six| six.nameserver).map(IpAddr::from));
    let nameservers: Vec<String> = nameservers.map(|ip| ip.to_string()).collect();
    let dns = match nameservers.is_empty() {
        true => json!({}),
        false => json!({ "nameservers": nameservers, "domain": place.domain, "search": [place.domain] }),
    };
    let mut interfaces = vec![device];
    if is_pair {
        interfaces.push(json!({ "name": interface, "mac": mac.to_string(), "sandbox": container }));
    }
    json!({ "cniVersion": config.version, "interfaces": interfaces, "ips": ips, "routes": routes.collect::<Vec<_>>(), "dns": dns })
}

/// Says why DEL has nothing to do: ADD refuses the same, so it has made nothing.
pub(crate) fn note_nothing_added(error: &CniError) {
    // A runtime that does not read has ended.
    let _ = writeln!(std::io::stderr(), "tombolo-cni: DEL: {error}; ADD refuses it, so there is nothing to remove");
}

fn del(environment: &Environment, config: &Config) -> Result<(), CniError> {
    let (container, interface) = match (environment.container(), environment.interface()) {
        (Ok(container), Ok(interface)) => (container, interface),
        (Err(error), _) | (_, Err(error)) if environment.names_attachment() => {
            note_nothing_added(&error);
            return Ok(());
        }
        (Err(error), _) | (_, Err(error)) => return Err(error),
    };
    // ADD makes nothing in a namespace whose path it refuses.
    let path = environment.netns().unwrap_or_default();
    let identity = config.identity(container, interface);
    let fabric = Fabric::new(config)?;
    let _turn = fabric.turn(mac_of(config, &identity))?;
    let removed = fabric.status().and_then(|status| {
        let mut all = fabric.containers(&status).into_iter().filter(|found| found.container == identity);
        all.try_for_each(|found| fabric.remove(&found.name))
    });
    let cleared = (|| {
        if config.vm == Some(Vm::VhostUser) {
            return forget_vm(config, &fabric.socket(mac_of(config, &identity)), container, interface);
        }
        // Of a namespace that is gone there is nothing left.
        let Some(netns) = path.and_then(|path| Netns::open(path).ok()) else { return Ok(()) };
        let mac = device_mac(config, &identity);
        delete_device(&netns, &device_name(&netns, interface, config, mac)?, mac)
    })();
    match removed {
        // The next daemon forgets the port when it finds that the device or the namespace is gone.
        // One that is only slow does not look at the device: the runtime tries again.
        Err(CniError::Away(why)) => {
            // A runtime that does not read has ended.
            let _ = writeln!(std::io::stderr(), "tombolo-cni: DEL: {why}; the port is forgotten by the next daemon");
            cleared
        }
        other => other.and(cleared),
    }
}

/// The MTU that an earlier answer has for an interface; answers before 1.1.0 have none.
fn told_mtu(before: Option<&Value>, name: &str) -> Option<u32> {
    let interfaces = before?.get("interfaces")?.as_array()?;
    let own = interfaces.iter().find(|i| i.get("name").and_then(Value::as_str) == Some(name))?;
    own.get("mtu")?.as_u64()?.try_into().ok().filter(|mtu| *mtu != 0)
}

/// The routers of the default routes in an earlier answer of this plugin: those that its addresses
/// have as gateways. Plugins after it may have added routes, and changed these.
fn told_routers(before: &Value) -> Vec<IpAddr> {
    let list = |key: &str| before.get(key).and_then(Value::as_array).into_iter().flatten();
    let address = |entry: &Value, key: &str| entry.get(key).and_then(Value::as_str)?.parse::<IpAddr>().ok();
    // The interface is the first of the list.
    let own = list("ips").filter(|ip| ip.get("interface").and_then(Value::as_u64) == Some(0));
    let gateways: Vec<IpAddr> = own.filter_map(|ip| address(ip, "gateway")).collect();
    let is_default = |route: &&Value| matches!(route.get("dst").and_then(Value::as_str), Some("0.0.0.0/0" | "::/0"));
    let routers = list("routes").filter(is_default).filter_map(|route| address(route, "gw"));
    routers.filter(|router| gateways.contains(router)).collect()
}

/// The routes of a namespace, as the kernel prints them.
struct Routes {
    v4: String,
    v6: String,
}

impl Routes {
    /// Those of the calling thread's namespace. A kernel without IPv6 has none of that family.
    fn read() -> std::io::Result<Routes> {
        let v4 = std::fs::read_to_string("/proc/thread-self/net/route")?;
        let v6 = match std::fs::read_to_string("/proc/thread-self/net/ipv6_route") {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            other => other?,
        };
        Ok(Routes { v4, v6 })
    }

    /// Whether the default route by `router` leads through `interface`. The columns are those of
    /// `fib_route_seq_show` and `rt6_info_route` in Linux: numbers are hexadecimal, and IPv4
    /// addresses are in the machine's byte order.
    fn has_default(&self, interface: &str, router: IpAddr) -> bool {
        let fields = |line: &str| line.split_whitespace().map(String::from).collect::<Vec<_>>();
        match router {
            IpAddr::V4(router) => {
                let gateway = format!("{:08X}", u32::from_ne_bytes(router.octets()));
                self.v4.lines().map(fields).any(|f| {
                    matches!(&f[..], [name, to, by, _, _, _, _, mask, ..]
                        if (&name[..], &to[..], &by[..], &mask[..]) == (interface, "00000000", &gateway, "00000000"))
                })
            }
            IpAddr::V6(router) => {
                let (any, gateway) = (format!("{:032x}", 0), format!("{:032x}", router.to_bits()));
                self.v6.lines().map(fields).any(|f| {
                    matches!(&f[..], [to, bits, _, _, by, _, _, _, _, name]
                        if (&name[..], &to[..], &by[..], &bits[..]) == (interface, &any, &gateway, "00"))
                })
            }
        }
    }
}

/// Whether an earlier answer of this plugin has a router for IPv6.
fn told_router6(before: &Value) -> bool {
    let mut ips = before.get("ips").and_then(Value::as_array).into_iter().flatten();
    let gateway = |ip: &Value| ip.get("gateway").and_then(Value::as_str)?.parse().ok();
    ips.any(|ip| gateway(ip).is_some_and(|ip: IpAddr| ip.is_ipv6()))
}

/// Compares the MTU and the default routes of the container's interface with what they were, or are
/// to be.
fn same_link(netns: &Netns, name: &str, config: &Config, network: &NetworkReport) -> Result<(), CniError> {
    let differs = |what: String| Err(CniError::Differs { what });
    let expected = told_mtu(config.prev_result.as_ref(), name).unwrap_or(network.mtu);
    let link = Interface::open(Some(netns), name).map_err(system)?;
    let mtu = link.state().map_err(system)?.mtu;
    if mtu != expected {
        return differs(format!("\"{name}\": expected the MTU {expected}, found {mtu}"));
    }
    let routers = match &config.prev_result {
        // A guest has its own routes.
        _ if config.vm.is_some() => vec![],
        Some(before) => told_routers(before),
        None if !config.default_route => vec![],
        None => network.router.map(IpAddr::from).into_iter().chain(network.router6.map(IpAddr::from)).collect(),
    };
    let table = netns.run(Routes::read).map_err(system)?.map_err(system)?;
    match routers.iter().find(|router| !table.has_default(name, **router)) {
        Some(router) => differs(format!("\"{name}\" has no default route by {router} any more")),
        None => Ok(()),
    }
}

fn check(environment: &Environment, config: &Config) -> Result<(), CniError> {
    let (container, interface, path) = (environment.container()?, environment.interface()?, environment.need_netns()?);
    let identity = config.identity(container, interface);
    let mac = mac_of(config, &identity);
    let differs = |what: String| CniError::Differs { what };
    let fabric = Fabric::new(config)?;
    let status = fabric.status()?;
    let network = fabric.network(&status)?;
    let found = fabric.containers(&status).into_iter().find(|found| found.container == identity);
    let found = found.ok_or_else(|| differs(format!("fabric \"{}\" has no port for {identity}", config.fabric)))?;
    let wanted = mac.to_string();
    let leases = || network.leases.iter().filter(|lease| lease.mac == wanted);
    // A virtual machine learns its address, and the network's prefix gives it one.
    let has_ipv6 = config.vm == Some(Vm::VhostUser) && network.mtu >= IPV6_MTU && network.prefix6.is_some()
        || leases().any(|lease| lease.fixed && lease.ip.is_ipv6());
    // Forwards from IPv6 are made by ADD where the network leads in by it then.
    let led_in = config.prev_result.as_ref().is_none_or(told_router6);
    for (protocol, listen, port) in config.listeners(has_ipv6 && led_in && network.router6.is_some()) {
        let to = format!("{}:{port}", found.name);
        let is_it = |f: &&ForwardReport| (f.proto == protocol, f.listen, &f.to) == (true, listen, &to);
        let fault = match status.forwards.iter().find(is_it) {
            None => format!("the fabric has no forward from {protocol} {listen} to {to}"),
            Some(ForwardReport { fault: Some(fault), .. }) => format!("the forward from {protocol} {listen}: {fault}"),
            Some(_) => continue,
        };
        return Err(differs(fault));
    }
    let netns = Netns::open(path).map_err(system)?;
    let mut device = None;
    if config.vm != Some(Vm::VhostUser) {
        let own = device_mac(config, &identity);
        let name = device_name(&netns, interface, config, own)?;
        let link = Interface::open(Some(&netns), &name).map_err(|e| differs(e.to_string()))?;
        let there = link.mac().map_err(system)?;
        if there != own.0 {
            return Err(differs(format!("\"{name}\": expected the address {own}, found {}", Mac(there))));
        }
        device = Some(name);
    } else if let Some(folder) = &config.dan {
        let (file, socket) = (dan::path(folder, container), fabric.socket(mac));
        let there = dan::find(folder, container, interface)?;
        let there = there.as_ref().and_then(dan::socket_of);
        if there != socket.to_str() {
            let expected = format!("device \"{interface}\" with the path {}", socket.display());
            return Err(differs(format!("{}: expected {expected}, found {there:?}", file.display())));
        }
    }
    // A virtual machine's has a carrier only while a monitor has opened it.
    if !found.up && config.vm.is_none() {
        return Err(differs(format!("port {} is down", found.name)));
    }
    // A guest's IPv6 addresses are its own choice.
    let is_fixed = |ip: IpAddr| ip.is_ipv4() || config.vm.is_none();
    let held = leases().filter(|lease| lease.fixed && is_fixed(lease.ip));
    let held: Vec<IpAddr> = held.map(|lease| lease.ip).collect();
    if !held.iter().any(IpAddr::is_ipv4) {
        return Err(differs(format!("port {} has no address in the fabric", found.name)));
    }
    // An address that is not this namespace's cannot be bound to. A guest has its own.
    for ip in held.iter().filter(|_| config.vm.is_none()) {
        let bound = netns.run(|| UdpSocket::bind((*ip, 0)).map(drop)).map_err(system)?;
        bound.map_err(|_| differs(format!("\"{interface}\" has not the address {ip} any more")))?;
    }
    if let Some(name) = device {
        same_link(&netns, &name, config, network)?;
    }
    let index = usize::from(config.vm == Some(Vm::Tap));
    same_addresses(config.prev_result.as_ref(), &held, index, interface, is_fixed).map_err(differs)
}

/// Compares the addresses that the fabric has for an interface with those of an earlier answer,
/// where there is one. The interface is at `index` there, and its addresses are those that are
/// `fixed`.
fn same_addresses(
    before: Option<&Value>,
    held: &[IpAddr],
    index: usize,
    interface: &str,
    fixed: impl Fn(IpAddr) -> bool,
) -> Result<(), String> {
    let Some(entries) = before.and_then(|r| r.get("ips")).and_then(Value::as_array) else { return Ok(()) };
    let address = |entry: &Value| {
        let address = entry.get("address").and_then(Value::as_str).unwrap_or_default();
        address.split('/').next().and_then(|a| a.parse::<IpAddr>().ok())
    };
    if let Some(ip) = held.iter().find(|ip| !entries.iter().any(|entry| address(entry) == Some(**ip))) {
        return Err(format!("prevResult does not have the address {ip} of \"{interface}\""));
    }
    // Plugins after this one may have added interfaces.
    let own = entries.iter().filter(|entry| entry.get("interface").and_then(Value::as_u64) == Some(index as u64));
    match own.filter_map(address).find(|ip| fixed(*ip) && !held.contains(ip)) {
        Some(ip) => Err(format!("prevResult has the address {ip} of \"{interface}\", which the fabric does not have")),
        None => Ok(()),
    }
}

fn status(config: &Config) -> Result<(), CniError> {
    let unable = |error: CniError| CniError::NotAvailable(error.to_string());
    let fabric = Fabric::new(config).map_err(unable)?;
    let status = fabric.status().map_err(unable)?;
    fabric.network(&status).map(drop).map_err(unable)
}

fn gc(config: &Config) -> Result<(), CniError> {
    let Some(valid) = &config.valid else {
        let what =
            "cni.dev/valid-attachments: expected the list of attachments that stay, found none: nothing was removed";
        return Err(CniError::Config(what.into()));
    };
    let stay: std::collections::BTreeSet<String> =
        valid.iter().map(|a| config.identity(&a.container, &a.interface)).collect();
    let fabric = Fabric::new(config)?;
    let mut failed = None;
    for found in fabric.containers(&fabric.status()?) {
        if !stay.contains(&found.container) {
            // The rest is removed all the same.
            failed = fabric.remove(&found.name).err().or(failed);
        }
    }
    if let Some(folder) = &config.dan {
        failed = dan::sweep(folder).err().or(failed);
    }
    // Also those whose port the daemon has removed already.
    for (container, interface, entry) in config.dan.iter().flat_map(|folder| dan::all_in(folder, fabric.folder())) {
        let identity = config.identity(&container, &interface);
        let socket = fabric.socket(mac_of(config, &identity));
        // Another network of this fabric may have the folder too; the socket's name tells whose
        // entry it is.
        if entry == socket && !stay.contains(&identity) {
            failed = forget_vm(config, &socket, &container, &interface).err().or(failed);
        }
    }
    failed.map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::Place6;

    fn answer(version: &str, more: &str) -> Value {
        let text = format!(r#"{{"cniVersion":"{version}","name":"pods","fabric":"demo"{more}}}"#);
        let config = crate::request::parse(Command::Add, text.as_bytes()).unwrap();
        let place = Place {
            ip: Ipv4Addr::new(10, 87, 0, 9),
            prefix: 24,
            router: Some(Ipv4Addr::new(10, 87, 0, 254)),
            nameserver: Some(Ipv4Addr::new(10, 87, 0, 1)),
            domain: "demo.internal".into(),
            mtu: 1500,
            six: (config.vm != Some(Vm::Tap)).then(|| Place6 {
                ip: "fd00:1:2:3::a57:9".parse().unwrap(),
                router: "fd00:1:2:3::2".parse().ok(),
                nameserver: "fd00:1:2:3::1".parse().ok(),
            }),
        };
        let socket = (config.vm == Some(Vm::VhostUser)).then_some("/run/tombolo/demo/c.sock");
        let macs = (Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 0, 2]));
        result(&config, ("c1", "eth0", "/run/netns/x"), macs, &place, routers_of(&place), socket)
    }

    #[test]
    fn the_answer_is_in_the_version_that_was_asked_in() {
        for version in VERSIONS {
            let answer = answer(version, "");
            assert_eq!(answer["cniVersion"], version);
            assert_eq!(answer["ips"][0]["address"], "10.87.0.9/24");
            assert_eq!(answer["ips"][0].get("version").is_some(), version < "1.0.0");
            assert_eq!(answer["ips"][1]["address"], "fd00:1:2:3::a57:9/64");
            assert_eq!(answer["ips"][1]["gateway"], "fd00:1:2:3::2");
            assert_eq!(answer["ips"][1].get("version"), (version < "1.0.0").then(|| json!("6")).as_ref());
            assert_eq!(answer["routes"][1], json!({ "dst": "::/0", "gw": "fd00:1:2:3::2" }));
            assert_eq!(answer["dns"]["nameservers"][1], "fd00:1:2:3::1");
            assert_eq!(answer["interfaces"][0].get("mtu").is_some(), version == "1.1.0");
            assert_eq!(answer["routes"][0]["gw"], "10.87.0.254");
            assert_eq!(answer["dns"]["nameservers"][0], "10.87.0.1");
        }
    }

    #[test]
    fn a_microvm_has_the_pair_that_firecracker_go_sdk_expects() {
        let answer = answer("1.0.0", r#","vm":"tap""#);
        let pair = answer["interfaces"].as_array().unwrap();
        assert_eq!(pair.len(), 2);
        assert_eq!((&pair[0]["name"], &pair[0]["sandbox"]), (&json!("eth0"), &json!("/run/netns/x")));
        assert_eq!((&pair[1]["name"], &pair[1]["sandbox"]), (&json!("eth0"), &json!("c1")));
        assert_eq!(pair[1]["mac"], "02:00:00:00:00:02");
        assert_eq!(answer["ips"].as_array().unwrap().len(), 1);
        assert_eq!(answer["ips"][0]["interface"], 1);
    }

    #[test]
    fn the_interface_of_a_virtual_machine_at_a_socket_has_its_path_where_the_version_has_it() {
        let answer11 = answer("1.1.0", r#","vm":"vhost-user""#);
        assert_eq!(answer11["interfaces"].as_array().unwrap().len(), 1);
        assert_eq!(answer11["interfaces"][0]["socketPath"], "/run/tombolo/demo/c.sock");
        assert_eq!(answer11["interfaces"][0]["sandbox"], "c1", "it is not in the namespace");
        assert_eq!((&answer11["ips"][0]["interface"], &answer11["ips"][1]["interface"]), (&json!(0), &json!(0)));
        let answer10 = answer("1.0.0", r#","vm":"vhost-user","dan":"/run/dans""#);
        assert_eq!(answer10["interfaces"][0].get("socketPath"), None);
    }

    #[test]
    fn addresses_of_an_earlier_answer_are_the_fabrics() {
        let answer = answer("1.1.0", "");
        let held: Vec<IpAddr> = vec!["10.87.0.9".parse().unwrap(), "fd00:1:2:3::a57:9".parse().unwrap()];
        let same = |held: &[IpAddr]| same_addresses(Some(&answer), held, 0, "eth0", |_| true);
        assert_eq!(same(&held), Ok(()));
        assert_eq!(same_addresses(None, &held, 0, "eth0", |_| true), Ok(()));
        assert!(same(&held[..1]).unwrap_err().contains("has the address fd00:1:2:3::a57:9"));
        let other = [held[0], "fd00:1:2:3::7".parse().unwrap()];
        assert!(same(&other).unwrap_err().contains("does not have the address fd00:1:2:3::7"));
        assert_eq!(same_addresses(Some(&answer), &[], 1, "eth0", |_| true), Ok(()), "another plugin's interface");
        assert_eq!(same_addresses(Some(&answer), &held[..1], 0, "eth0", |ip| ip.is_ipv4()), Ok(()), "a guest's choice");
    }

    #[test]
    fn the_routes_and_the_mtu_of_an_earlier_answer_are_found_in_what_the_kernel_prints() {
        let mut before = answer("1.1.0", "");
        let [four, six] = ["10.87.0.254", "fd00:1:2:3::2"].map(|ip| ip.parse::<IpAddr>().unwrap());
        assert_eq!(told_routers(&before), [four, six]);
        assert_eq!((told_mtu(Some(&before), "eth0"), told_mtu(Some(&before), "eth1")), (Some(1500), None));
        assert_eq!((told_mtu(Some(&answer("1.0.0", "")), "eth0"), told_mtu(None, "eth0")), (None, None));
        // Another plugin's route, and one of this plugin's that another one replaced.
        before["routes"] =
            json!([{ "dst": "0.0.0.0/0", "gw": "10.99.0.1" }, { "dst": "10.2.0.0/16", "gw": "10.87.0.254" }, {}]);
        assert!(told_routers(&before).is_empty() && told_routers(&json!([])).is_empty());
        let heading = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT";
        let v4 = format!(
            "{heading}\neth0\t00000000\tFE00570A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
             eth0\t0000570A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
        );
        let zero = "0".repeat(32);
        let v6 = format!(
            "{zero} 00 {zero} 00 fd000001000200030000000000000002 00000400 1 0 00000003     eth0\n{zero} 00 {zero} 00 {zero} ffffffff 1 0 00200200       lo\n"
        );
        let table = Routes { v4, v6 };
        assert!(table.has_default("eth0", four) && table.has_default("eth0", six));
        assert!(!table.has_default("eth1", four) && !table.has_default("eth1", six));
        assert!(!table.has_default("eth0", "10.87.0.1".parse().unwrap()));
        assert!(!table.has_default("eth0", "fd00:1:2:3::3".parse().unwrap()));
        let none = Routes { v4: heading.into(), v6: String::new() };
        assert!(!none.has_default("eth0", four) && !none.has_default("eth0", six));
    }

    #[test]
    fn gc_without_a_list_and_commands_of_newer_versions_are_refused() {
        let config = |version| {
            let text =
                format!(r#"{{"cniVersion":"{version}","name":"pods","fabric":"demo","runtime":"/nonexistent"}}"#);
            crate::request::parse(Command::Add, text.as_bytes()).unwrap()
        };
        let environment = Environment::default();
        let code = |command, version| run(command, &environment, &config(version), &Caller::now()).unwrap_err().code();
        assert_eq!(code(Command::Gc, "1.1.0"), 7);
        assert_eq!(code(Command::Gc, "1.0.0"), 1);
        assert_eq!(code(Command::Status, "1.0.0"), 1);
        assert_eq!(code(Command::Status, "1.1.0"), 50, "no daemon");
        assert_eq!(code(Command::Check, "0.3.1"), 1);
        assert_eq!(code(Command::Add, "1.1.0"), 4, "nothing in the environment");
        let answer = run(Command::Version, &environment, &config("0.4.0"), &Caller::now()).unwrap().unwrap();
        assert_eq!(answer["supportedVersions"].as_array().unwrap().len(), 4);
    }

    #[test]
    fn del_without_a_daemon_and_without_a_namespace_succeeds() {
        let text = r#"{"cniVersion":"1.1.0","name":"pods","fabric":"demo","runtime":"/nonexistent"}"#;
        let config = crate::request::parse(Command::Add, text.as_bytes()).unwrap();
        let environment = Environment {
            container: Some("c1".into()),
            interface: Some("eth0".into()),
            netns: Some("/nonexistent/netns".into()),
            ..Environment::default()
        };
        assert_eq!(run(Command::Del, &environment, &config, &Caller::now()).unwrap(), None);
        let error = run(Command::Add, &environment, &config, &Caller::now()).unwrap_err();
        assert_eq!(error.code(), 11, "{error}");
    }
}
