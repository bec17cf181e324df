# Interrupt and exception entries. No Rust runs in interrupt context: a device's interrupt only counts and is
# acknowledged; its work is done by the main loop that it woke. An exception never returns.

    .section .text
    .altmacro

    .macro exception number, has_code
cell_exception_\number:
    .if \has_code == 0
    pushq $0
    .endif
    pushq $\number
    jmp cell_exception_common
    .endm

    .macro exception_address number
    .quad cell_exception_\number
    .endm

    .set n, 0
    .rept 32
    .if (n == 8) || ((n >= 10) && (n <= 14)) || (n == 17) || (n == 21) || (n == 29) || (n == 30)
    exception %n, 1
    .else
    exception %n, 0
    .endif
    .set n, n + 1
    .endr

cell_exception_common:
    pushq %rax
    pushq %rbx
    pushq %rcx
    pushq %rdx
    pushq %rsi
    pushq %rdi
    pushq %rbp
    pushq %r8
    pushq %r9
    pushq %r10
    pushq %r11
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    cld
    movq %rsp, %rdi
    andq $-16, %rsp
    call cell_exception
    ud2

    .macro interrupt number
cell_interrupt_\number:
    lock incq cell_interrupts + 8 * \number(%rip)
    jmp cell_end_of_interrupt
    .endm

    .macro interrupt_address number
    .quad cell_interrupt_\number
    .endm

    .set n, 0
    .rept 16
    interrupt %n
    .set n, n + 1
    .endr

cell_end_of_interrupt:
    pushq %rax
    movq cell_eoi(%rip), %rax
    testq %rax, %rax
    jz 1f
    movl $0, (%rax)                 # xAPIC: the EOI register
    popq %rax
    iretq
1:  pushq %rcx                      # x2APIC: MSR 0x80b
    pushq %rdx
    movl $0x80b, %ecx
    xorl %eax, %eax
    xorl %edx, %edx
    wrmsr
    popq %rdx
    popq %rcx
    popq %rax
    .globl cell_spurious
cell_spurious:
    iretq

    .section .rodata
    .balign 8
    .globl cell_exception_table, cell_interrupt_table
cell_exception_table:
    .set n, 0
    .rept 32
    exception_address %n
    .set n, n + 1
    .endr
cell_interrupt_table:
    .set n, 0
    .rept 16
    interrupt_address %n
    .set n, n + 1
    .endr

    .section .bss
    .balign 8
    .globl cell_interrupts, cell_eoi
cell_interrupts: .skip 8 * 16
cell_eoi: .skip 8
