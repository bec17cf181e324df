# From the loader's 32-bit entry to Rust in 64-bit mode. AT&T syntax.
#
# PVH (Xen's docs/misc/pvh.pandoc): the ELF note names cell_pvh_entry; the loader enters it in 32-bit protected mode,
# paging off, interrupts off, %ebx = physical address of hvm_start_info.

    .section .note.Xen, "a", @note
    .balign 4
    .long 4, 4, 18                  # name size, descriptor size, XEN_ELFNOTE_PHYS32_ENTRY
    .asciz "Xen"
    .long cell_pvh_entry

    .section .boot, "ax", @progbits
    .code32

# e_entry is taken by loaders that do not know PVH, in 32-bit or in 64-bit mode. Each instruction here has the same
# bytes and the same meaning in both: say what is wrong on COM1, leave by isa-debug-exit if there is one, stop.
    .globl cell_elf_entry
cell_elf_entry:
    cli
    cld
    movl $cell_not_pvh, %esi
    movl $0x3f8, %edx
1:  lodsb
    testb %al, %al
    jz 2f
    outb %al, %dx
    jmp 1b
2:  movl $0xf4, %edx
    movb $0x14, %al                 # ExitCode::NotPvh
    outb %al, %dx
3:  hlt
    jmp 3b

cell_pvh_entry:
    cli
    cld
    # PML4 -> PDPT -> four page directories: 0 to 4 GiB in pages of 2 MiB, each at its own address.
    movl $cell_pdpt + 3, cell_pml4
    movl $cell_pd + 3, %eax
    movl $cell_pdpt, %edi
    movl $4, %ecx
1:  movl %eax, (%edi)
    addl $0x1000, %eax
    addl $8, %edi
    loop 1b
    movl $cell_pd, %edi
    xorl %ecx, %ecx                 # index of the 2 MiB page
    movl $0x83, %eax                # present, writable, 2 MiB
2:  xorl %edx, %edx
    cmpl $4, %ecx                   # the image may lie in the first 8 MiB; nothing else is ever executed
    jb 3f
    movl $0x80000000, %edx          # no-execute
3:  cmpl $1536, %ecx                # 3 to 4 GiB: devices, uncached
    jne 4f
    orl $0x18, %eax
4:  movl %eax, (%edi)
    movl %edx, 4(%edi)
    addl $0x200000, %eax
    addl $8, %edi
    incl %ecx
    cmpl $2048, %ecx
    jne 2b

    movl %cr4, %eax
    orl $0x620, %eax                # PAE, OSFXSR, OSXMMEXCPT
    movl %eax, %cr4
    movl $cell_pml4, %eax
    movl %eax, %cr3
    movl $0xc0000080, %ecx          # EFER: long mode, no-execute
    rdmsr
    orl $0x900, %eax
    wrmsr
    movl %cr0, %eax
    andl $0xfffffff3, %eax          # not EM, not TS: SSE works
    orl $0x80010023, %eax           # PG, WP, NE, MP, PE
    movl %eax, %cr0
    lgdt cell_gdt_pointer
    ljmp $8, $cell_long_mode

    .code64
cell_long_mode:
    movw $16, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    movw %ax, %fs
    movw %ax, %gs
    movl $cell_stack_top, %esp
    xorl %ebp, %ebp
    movl %ebx, %edi
    call cell_start
    ud2

    .section .rodata
cell_not_pvh:
    .asciz "tombolo-cell: this loader entered the ELF entry point; boot the image by its PVH note\n"

    .section .data
    .balign 16
    .globl cell_gdt
cell_gdt:
    .quad 0
    .quad 0x00af9b000000ffff        # 8: code, 64 bit
    .quad 0x00cf93000000ffff        # 16: data
    .quad 0, 0                      # 24: TSS, filled in by traps.rs
cell_gdt_pointer:
    .word . - cell_gdt - 1
    .quad cell_gdt

    .section .bss
    .balign 4096
    .globl cell_pml4, cell_pdpt, cell_pd, cell_pt
cell_pml4: .skip 4096
cell_pdpt: .skip 4096
cell_pd:   .skip 4 * 4096
cell_pt:   .skip 4 * 4096           # the first 8 MiB in pages of 4 KiB, filled in by paging.rs
    .globl cell_stack_guard, cell_stack_top, cell_ist_irq_top, cell_ist_fault_top
cell_stack_guard: .skip 4096        # never mapped: a stack that overflows faults here
    .skip 128 * 1024
cell_stack_top:
    .skip 4096
cell_ist_irq_top:
    .skip 16 * 1024
cell_ist_fault_top:
