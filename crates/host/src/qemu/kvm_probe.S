# A ROM of 4 KiB that does what the kernel of any guest does first: protected mode, page tables, long mode, SSE2, timer
# interrupts of the local APIC. It leaves through isa-debug-exit with 0x21 (QEMU's exit code is then 67), or with 0x22
# when it computed nonsense. A machine whose KVM opens but stalls on the way shows it here.
#
# clang -c -target x86_64-linux-gnu kvm_probe.S -o p.o && objcopy -O binary -j .text p.o kvm_probe.bin
        .code16
        .org 0
start16:
        cli
        cld
        movw    %cs, %ax
        movw    %ax, %ds
        lgdtl   %cs:(0xf000 + gdt_ptr - start16)
        movl    %cr0, %eax
        orb     $1, %al
        movl    %eax, %cr0
        ljmpl   $8, $0xfffff000 + (start32 - start16)
        .code32
start32:
        movw    $16, %ax
        movw    %ax, %ds
        movw    %ax, %es
        movw    %ax, %ss
        movl    $0x9000, %esp
        # page tables at 0x1000: PML4, PDPT, PD for 0-1 GiB and PD for 3-4 GiB
        movl    $0x1000, %edi
        xorl    %eax, %eax
        movl    $0x1400, %ecx
        rep stosl
        movl    $0x2003, 0x1000
        movl    $0x3003, 0x2000
        movl    $0x4003, 0x2018
        movl    $0x83, 0x3000
        movl    $0xfee0009b, 0x4fb8
        movl    $0xffe00083, 0x4ff8
        movl    $0x1000, %eax
        movl    %eax, %cr3
        movl    $0x620, %eax
        movl    %eax, %cr4
        movl    $0xc0000080, %ecx
        rdmsr
        orl     $0x100, %eax
        wrmsr
        movl    %cr0, %eax
        andl    $~0xe, %eax
        orl     $0x80000002, %eax
        movl    %eax, %cr0
        ljmpl   $24, $0xfffff000 + (start64 - start16)
        .code64
start64:
        # compute: an SSE2 sum and a loop in long mode
        pxor    %xmm0, %xmm0
        pcmpeqd %xmm1, %xmm1
        movl    $1000000, %ecx
1:      paddd   %xmm1, %xmm0
        decl    %ecx
        jnz     1b
        movd    %xmm0, %eax
        cmpl    $-1000000, %eax
        jne     fail
        # IDT at 0x5000: vector 0x20 -> tick
        leaq    tick(%rip), %rax
        movl    $0x5200, %edi
        movw    %ax, (%rdi)
        movw    $24, 2(%rdi)
        movw    $0x8e00, 4(%rdi)
        shrq    $16, %rax
        movw    %ax, 6(%rdi)
        shrq    $16, %rax
        movl    %eax, 8(%rdi)
        movw    $0xfff, 0x6000
        movq    $0x5000, 0x6002
        lidt    0x6000
        # local APIC: enabled, its timer periodic on vector 0x20
        movl    $0xfee00000, %esi
        movl    $0x1ff, 0xf0(%rsi)
        movl    $0x0b, 0x3e0(%rsi)
        movl    $0x20020, 0x320(%rsi)
        movl    $100000, 0x380(%rsi)
        xorl    %ebx, %ebx
        sti
2:      hlt
        cmpl    $3, %ebx
        jb      2b
        movb    $0x21, %al
        jmp     leave
fail:   movb    $0x22, %al
leave:  movw    $0xf4, %dx
        outb    %al, %dx
3:      hlt
        jmp     3b
tick:   incl    %ebx
        movl    $0, 0xb0(%rsi)
        iretq
        .balign 8
gdt:    .quad 0
        .quad 0x00cf9a000000ffff
        .quad 0x00cf92000000ffff
        .quad 0x00af9a000000ffff
gdt_ptr:
        .word gdt_ptr - gdt - 1
        .long 0xfffff000 + (gdt - start16)
        .org 0xff0
        .code16
        jmp start16
        .org 0x1000
