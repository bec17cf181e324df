//! Calls to Xen: the hypercall page, and one safe function for each call that a cell makes.
//!
//! Numbers and structures: Xen 4.17, public/xen.h, event_channel.h, grant_table.h, memory.h,
//! sched.h, vcpu.h, hvm/hvm_op.h, hvm/params.h, arch-x86/cpuid.h. Arguments lie in local memory for
//! the length of a call; where Xen is told of memory that it keeps using, the function takes a page
//! of [`super::dma`], which Rust never owned.
#![allow(unsafe_code)]

use super::cpu::{self, cpuid};
use core::arch::{asm, global_asm};
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use tombolo_ring::mem::ForeignMut;

// The page that Xen fills with one entry of 32 bytes for each hypercall; paging.rs makes it
// executable and read-only.
global_asm!(
    ".section .bss.hypercall,\"aw\",@nobits",
    ".balign 4096",
    ".globl cell_hypercall_page",
    "cell_hypercall_page: .skip 4096",
    ".text"
);

unsafe extern "C" {
    static cell_hypercall_page: u8;
}

const FIRST_LEAF: u32 = 0x4000_0000;
const LAST_LEAF: u32 = 0x4001_0000;
const LEAF_STEP: u32 = 0x100;
const SIGNATURE: &[u8; 12] = b"XenVMMXenVMM";
const ENTRY_BYTES: usize = 32;
const PAGE_BITS: u32 = 12;
const PAGE: usize = 1 << PAGE_BITS;

const MEMORY_OP: usize = 12;
const VCPU_OP: usize = 24;
const SCHED_OP: usize = 29;
const EVENT_CHANNEL_OP: usize = 32;
const HVM_OP: usize = 34;

const ADD_TO_PHYSMAP: usize = 7;
const SPACE_SHARED_INFO: u32 = 0;
const SPACE_GRANT_TABLE: u32 = 1;
const STOP_PERIODIC_TIMER: usize = 7;
const SET_SINGLESHOT_TIMER: usize = 8;
const SCHED_YIELD: usize = 0;
const SCHED_SHUTDOWN: usize = 2;
const SCHED_POLL: usize = 3;
const EVTCHN_BIND_VIRQ: usize = 1;
const EVTCHN_CLOSE: usize = 3;
const EVTCHN_SEND: usize = 4;
const EVTCHN_STATUS: usize = 5;
const EVTCHN_ALLOC_UNBOUND: usize = 6;
const EVTCHN_UNMASK: usize = 9;
const EVTCHN_INIT_CONTROL: usize = 11;
const EVTCHN_EXPAND_ARRAY: usize = 12;
const HVM_SET_PARAM: usize = 0;
const HVM_GET_PARAM: usize = 1;
const HVM_SET_UPCALL_VECTOR: usize = 23;

/// The other end has not bound to the channel, or has closed its own end (EVTCHNSTAT_unbound).
const STATUS_UNBOUND: u32 = 1;

/// "This domain", wherever a call takes a domain.
const DOMID_SELF: u16 = 0x7ff0;
/// The timer's virtual interrupt.
const VIRQ_TIMER: u32 = 0;

/// A parameter of the domain that its builder has set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Param {
    CallbackVia = 0,
    StorePage = 1,
    StorePort = 2,
    ConsolePage = 17,
    ConsolePort = 18,
}

/// Why a domain stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum ShutdownReason {
    Poweroff = 0,
    Reboot = 1,
    Suspend = 2,
    Crash = 3,
}

/// The negative error number (public/errno.h) with which Xen refused a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refused(pub(crate) i64);

static ON_XEN: AtomicBool = AtomicBool::new(false);

/// Whether hypercalls can be made.
pub(crate) fn is_available() -> bool {
    ON_XEN.load(Relaxed)
}

/// The hypercall page's address.
pub(super) fn page() -> usize {
    (&raw const cell_hypercall_page).addr()
}

/// Looks for Xen, and has it fill the hypercall page. Called once, before any other function here.
pub(super) fn init() -> bool {
    const HYPERVISOR_PRESENT: u32 = 1 << 31;
    if cpuid(1).ecx & HYPERVISOR_PRESENT == 0 {
        return false;
    }
    // Where Xen plays another hypervisor besides, its own leaves are further up.
    let base = (FIRST_LEAF..LAST_LEAF).step_by(LEAF_STEP as usize).find(|leaf| {
        let name = cpuid(*leaf);
        let mut text = [0; 12];
        for (part, word) in text.chunks_exact_mut(4).zip([name.ebx, name.ecx, name.edx]) {
            part.copy_from_slice(&word.to_le_bytes());
        }
        text == *SIGNATURE
    });
    let Some(base) = base else { return false };
    let msr = cpuid(base + 2).ebx;
    // SAFETY: Xen writes its entries into the page, which is nothing else's, now and when the
    // domain is restored.
    unsafe { cpu::write_msr(msr, page() as u64) };
    ON_XEN.store(true, Relaxed);
    true
}

/// # Safety
/// `number` and the arguments are a call of Xen's; memory that they name is valid for what the call
/// does with it.
unsafe fn call(number: usize, first: usize, second: usize, third: usize) -> Result<usize, Refused> {
    // On the host there is no Xen: all is granted, nothing happens.
    if cfg!(test) {
        return Ok(0);
    }
    assert!(is_available(), "a hypercall without Xen");
    let entry = page() + number * ENTRY_BYTES;
    let result: i64;
    // SAFETY: Xen has filled the page (`is_available`); its entry keeps to this convention
    // (public/arch-x86/xen.h); the rest is the caller's promise. Not `nomem`: Xen reads and writes
    // arguments. Not `nostack`: `call` pushes.
    unsafe {
        asm!(
            "call {entry}",
            entry = in(reg) entry,
            out("rax") result,
            inlateout("rdi") first => _,
            inlateout("rsi") second => _,
            inlateout("rdx") third => _,
            out("rcx") _,
            out("r8") _,
            out("r10") _,
            out("r11") _,
        );
    }
    if result < 0 { Err(Refused(result)) } else { Ok(result as usize) }
}

/// A call whose arguments are a structure in local memory that Xen reads, and may answer in.
fn call_with<T>(number: usize, operation: usize, argument: &mut T) -> Result<usize, Refused> {
    // SAFETY: each caller below passes the structure of that operation. Its members name no other
    // memory of Rust's, but for that of `poll`, which Xen reads within the call.
    unsafe { call(number, operation, (&raw mut *argument).expose_provenance(), 0) }
}

#[repr(C)]
struct ParamArgument {
    domain: u16,
    index: u32,
    value: u64,
}

/// Sets a parameter of this domain.
pub(crate) fn set_param(which: Param, value: u64) -> Result<(), Refused> {
    let mut argument = ParamArgument { domain: DOMID_SELF, index: which as u32, value };
    call_with(HVM_OP, HVM_SET_PARAM, &mut argument).map(drop)
}

/// A parameter of this domain; `None` where it is not set.
pub(crate) fn param(which: Param) -> Option<u64> {
    let mut argument = ParamArgument { domain: DOMID_SELF, index: which as u32, value: 0 };
    call_with(HVM_OP, HVM_GET_PARAM, &mut argument).ok()?;
    (argument.value != 0).then_some(argument.value)
}

/// Has Xen raise `vector` of this processor when an event comes.
pub(crate) fn set_upcall_vector(vector: u8) -> Result<(), Refused> {
    #[repr(C)]
    struct Argument {
        processor: u32,
        vector: u8,
    }
    call_with(HVM_OP, HVM_SET_UPCALL_VECTOR, &mut Argument { processor: 0, vector }).map(drop)
}

/// Puts a page of Xen's in the place of `page`.
fn add_to_physmap(space: u32, index: u64, page: ForeignMut<'static>) -> Result<(), Refused> {
    #[repr(C)]
    struct Argument {
        domain: u16,
        size: u16,
        space: u32,
        index: u64,
        frame: u64,
    }
    assert!(page.len() == PAGE && page.as_mut_ptr().addr().is_multiple_of(PAGE), "one whole page is exchanged");
    let mut argument = Argument { domain: DOMID_SELF, size: 0, space, index, frame: frame(page) };
    // No Rust reference points into a `ForeignMut`, so its content may be exchanged.
    call_with(MEMORY_OP, ADD_TO_PHYSMAP, &mut argument).map(drop)
}

/// The number of the frame that `page` begins in, as Xen names it: addresses are those of the
/// machine that Xen shows.
pub(crate) fn frame(page: ForeignMut<'static>) -> u64 {
    let frame = (page.as_mut_ptr().expose_provenance() >> PAGE_BITS) as u64;
    // A test's addresses have more bits than a machine's frames; it finds pages by their
    // references.
    if cfg!(test) { frame & 0xffff_ffff } else { frame }
}

/// Puts the shared information page in the place of `page`.
pub(crate) fn map_shared_info(page: ForeignMut<'static>) -> Result<(), Refused> {
    add_to_physmap(SPACE_SHARED_INFO, 0, page)
}

/// Puts page `index` of the grant table in the place of `page`.
pub(crate) fn map_grant_table(index: u64, page: ForeignMut<'static>) -> Result<(), Refused> {
    add_to_physmap(SPACE_GRANT_TABLE, index, page)
}

/// A new event channel that domain `remote` may bind to.
pub(crate) fn alloc_unbound(remote: u16) -> Result<u32, Refused> {
    #[repr(C)]
    struct Argument {
        domain: u16,
        remote: u16,
        port: u32,
    }
    let mut argument = Argument { domain: DOMID_SELF, remote, port: 0 };
    call_with(EVENT_CHANNEL_OP, EVTCHN_ALLOC_UNBOUND, &mut argument)?;
    Ok(argument.port)
}

/// The event channel of this processor's timer.
pub(crate) fn bind_timer() -> Result<u32, Refused> {
    #[repr(C)]
    struct Argument {
        interrupt: u32,
        processor: u32,
        port: u32,
    }
    let mut argument = Argument { interrupt: VIRQ_TIMER, processor: 0, port: 0 };
    call_with(EVENT_CHANNEL_OP, EVTCHN_BIND_VIRQ, &mut argument)?;
    Ok(argument.port)
}

/// Sends an event. A channel whose other end has gone takes it and does nothing.
pub(crate) fn send(port: u32) {
    let mut port = port;
    // It fails only for a port that is not open, and then there is no receiver.
    let _ = call_with(EVENT_CHANNEL_OP, EVTCHN_SEND, &mut port);
}

/// Whether an event channel waits for the other domain to bind to it, for the first time or again.
pub(crate) fn is_unbound(port: u32) -> bool {
    /// `evtchn_status`; Xen answers in all but the first two members.
    #[repr(C)]
    struct Argument {
        domain: u16,
        port: u32,
        status: u32,
        processor: u32,
        detail: [u32; 2],
    }
    let mut argument = Argument { domain: DOMID_SELF, port, status: 0, processor: 0, detail: [0; 2] };
    call_with(EVENT_CHANNEL_OP, EVTCHN_STATUS, &mut argument).is_ok() && argument.status == STATUS_UNBOUND
}

/// Lets events of a channel through; one that came before is delivered now.
pub(crate) fn unmask(port: u32) -> Result<(), Refused> {
    let mut port = port;
    call_with(EVENT_CHANNEL_OP, EVTCHN_UNMASK, &mut port).map(drop)
}

/// Has Xen use FIFO event channels, with the control block of this processor at the start of
/// `page`. Refused by a Xen that has them not.
pub(crate) fn use_fifo_events(page: ForeignMut<'static>) -> Result<(), Refused> {
    /// `evtchn_init_control`; Xen answers with the bits of a link, of which it has had 17 ever
    /// since.
    #[repr(C)]
    struct Argument {
        frame: u64,
        offset: u32,
        processor: u32,
        link_bits: u8,
        padding: [u8; 7],
    }
    let mut argument = Argument { frame: frame(page), offset: 0, processor: 0, link_bits: 0, padding: [0; 7] };
    call_with(EVENT_CHANNEL_OP, EVTCHN_INIT_CONTROL, &mut argument).map(drop)
}

/// Adds `page` to the event array, whose words are masked.
pub(crate) fn expand_event_array(page: ForeignMut<'static>) -> Result<(), Refused> {
    let mut frame = frame(page);
    call_with(EVENT_CHANNEL_OP, EVTCHN_EXPAND_ARRAY, &mut frame).map(drop)
}

/// Closes an event channel.
pub(crate) fn close(port: u32) {
    let mut port = port;
    // It fails for a port that is closed already.
    let _ = call_with(EVENT_CHANNEL_OP, EVTCHN_CLOSE, &mut port);
}

/// Stops the timer that ticks by itself, where this Xen has one for such domains.
pub(crate) fn stop_periodic_timer() {
    // SAFETY: the call takes the processor's number and no memory.
    let _ = unsafe { call(VCPU_OP, STOP_PERIODIC_TIMER, 0, 0) };
}

/// Sets the timer to send its event once, when Xen's system time is `at_ns`.
pub(crate) fn set_timer(at_ns: u64) {
    #[repr(C)]
    struct Argument {
        at_ns: u64,
        flags: u32,
    }
    let mut argument = Argument { at_ns, flags: 0 };
    // SAFETY: the structure of that operation, which names no other memory; processor 0 is this
    // one.
    let _ = unsafe { call(VCPU_OP, SET_SINGLESHOT_TIMER, 0, (&raw mut argument).expose_provenance()) };
}

/// Lets other domains run.
pub(crate) fn yield_now() {
    // SAFETY: the call takes no argument.
    let _ = unsafe { call(SCHED_OP, SCHED_YIELD, 0, 0) };
}

/// Most channels of a [`poll`] (do_poll in xen/common/sched/core.c).
const MAX_POLLED: usize = 128;

/// Sleeps until one of these channels has an event that was not taken, or until Xen's system time
/// is `until_ns`. Interrupts are off.
pub(crate) fn poll(ports: &[u32], until_ns: Option<u64>) -> Result<(), Refused> {
    /// `sched_poll`; no time is 0.
    #[repr(C)]
    struct Argument {
        ports: usize,
        count: u32,
        until_ns: u64,
    }
    if ports.len() > MAX_POLLED {
        return Err(Refused(-22));
    }
    let until_ns = until_ns.map_or(0, |until_ns| until_ns.max(1));
    let mut argument = Argument { ports: ports.as_ptr().expose_provenance(), count: ports.len() as u32, until_ns };
    // `ports` is borrowed for the length of the call, in which Xen reads so many of them.
    call_with(SCHED_OP, SCHED_POLL, &mut argument).map(drop)
}

/// Stops the domain so that the toolstack can save it. Returns when it goes on: `true` as the same
/// domain, with all that Xen keeps for it, and `false` as another one that was restored, or where
/// Xen has refused.
pub(crate) fn suspend() -> bool {
    let mut argument = ShutdownReason::Suspend as u32;
    // Interrupts are off here, and what Xen tells of the machine is read again after this.
    call_with(SCHED_OP, SCHED_SHUTDOWN, &mut argument) == Ok(1)
}

/// Stops the domain for good, for `reason`.
pub(crate) fn shutdown(reason: ShutdownReason) -> ! {
    let mut argument = reason as u32;
    loop {
        let _ = call_with(SCHED_OP, SCHED_SHUTDOWN, &mut argument);
    }
}
