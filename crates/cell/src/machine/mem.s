# memcpy and its family. In assembler, since LLVM would turn a loop in Rust into a call of itself. By eight bytes in general
# registers: under emulation `rep movsb` copies 60 MB/s, 16 bytes through an SSE register 1600 MB/s, since such a register is
# a place in the emulator's memory, and this 3300 to 5200 MB/s. System V calling convention.

    .section .text
    .globl memcpy, memmove, memset, memcmp, bcmp, strlen

memmove:
    movq %rdi, %rax
    subq %rsi, %rax
    cmpq %rdx, %rax                 # unsigned: to - from < n means that `to` lies inside the source
    jb cell_copy_backward
memcpy:
    movq %rdi, %rax
    cmpq $16, %rdx
    jb 3f
    cmpq $32, %rdx
    jbe 2f
    movups -16(%rsi,%rdx), %xmm4    # the last 16 bytes, before anything is written over them; %rdi + %rdx stays the end
    movq %rdi, %r11
    cmpq $64, %rdx
    jb 5f
1:  movq (%rsi), %rax
    movq 8(%rsi), %rcx
    movq 16(%rsi), %r8
    movq 24(%rsi), %r9
    movq %rax, (%rdi)
    movq %rcx, 8(%rdi)
    movq %r8, 16(%rdi)
    movq %r9, 24(%rdi)
    movq 32(%rsi), %rax
    movq 40(%rsi), %rcx
    movq 48(%rsi), %r8
    movq 56(%rsi), %r9
    movq %rax, 32(%rdi)
    movq %rcx, 40(%rdi)
    movq %r8, 48(%rdi)
    movq %r9, 56(%rdi)
    addq $64, %rsi
    addq $64, %rdi
    subq $64, %rdx
    cmpq $64, %rdx
    jae 1b
5:  cmpq $16, %rdx
    jb 6f
    movq (%rsi), %rax
    movq 8(%rsi), %rcx
    movq %rax, (%rdi)
    movq %rcx, 8(%rdi)
    addq $16, %rsi
    addq $16, %rdi
    subq $16, %rdx
    jmp 5b
6:  movups %xmm4, -16(%rdi,%rdx)
    movq %r11, %rax
    ret
2:  movups (%rsi), %xmm0            # 16 to 32 bytes: two moves that may overlap
    movups -16(%rsi,%rdx), %xmm1
    movups %xmm0, (%rdi)
    movups %xmm1, -16(%rdi,%rdx)
    ret
3:  cmpq $8, %rdx
    jb 4f
    movq (%rsi), %rcx
    movq -8(%rsi,%rdx), %r8
    movq %rcx, (%rdi)
    movq %r8, -8(%rdi,%rdx)
    ret
4:  cmpq $4, %rdx
    jb 7f
    movl (%rsi), %ecx
    movl -4(%rsi,%rdx), %r8d
    movl %ecx, (%rdi)
    movl %r8d, -4(%rdi,%rdx)
    ret
7:  testq %rdx, %rdx
    jz 8f
    movzbl (%rsi), %ecx             # 1 to 3 bytes
    movzbl -1(%rsi,%rdx), %r8d
    movq %rdx, %r9
    shrq $1, %r9
    movzbl (%rsi,%r9), %r10d
    movb %cl, (%rdi)
    movb %r10b, (%rdi,%r9)
    movb %r8b, -1(%rdi,%rdx)
8:  ret

cell_copy_backward:
    movq %rdi, %rax
1:  cmpq $32, %rdx
    jb 2f
    movq -8(%rsi,%rdx), %rcx
    movq -16(%rsi,%rdx), %r8
    movq -24(%rsi,%rdx), %r9
    movq -32(%rsi,%rdx), %r10
    movq %rcx, -8(%rdi,%rdx)
    movq %r8, -16(%rdi,%rdx)
    movq %r9, -24(%rdi,%rdx)
    movq %r10, -32(%rdi,%rdx)
    subq $32, %rdx
    jmp 1b
2:  cmpq $8, %rdx
    jb 3f
    movq -8(%rsi,%rdx), %rcx
    movq %rcx, -8(%rdi,%rdx)
    subq $8, %rdx
    jmp 2b
3:  testq %rdx, %rdx
    jz 4f
    movb -1(%rsi,%rdx), %cl
    movb %cl, -1(%rdi,%rdx)
    decq %rdx
    jmp 3b
4:  ret

memset:
    movq %rdi, %rax
    movzbl %sil, %esi
    movabsq $0x0101010101010101, %rcx
    imulq %rsi, %rcx
    cmpq $16, %rdx
    jb 3f
    movq %rcx, -16(%rdi,%rdx)
    movq %rcx, -8(%rdi,%rdx)
1:  cmpq $64, %rdx
    jb 2f
    movq %rcx, (%rdi)
    movq %rcx, 8(%rdi)
    movq %rcx, 16(%rdi)
    movq %rcx, 24(%rdi)
    movq %rcx, 32(%rdi)
    movq %rcx, 40(%rdi)
    movq %rcx, 48(%rdi)
    movq %rcx, 56(%rdi)
    addq $64, %rdi
    subq $64, %rdx
    jmp 1b
2:  cmpq $16, %rdx
    jb 4f
    movq %rcx, (%rdi)
    movq %rcx, 8(%rdi)
    addq $16, %rdi
    subq $16, %rdx
    jmp 2b
4:  ret
3:  cmpq $8, %rdx
    jb 5f
    movq %rcx, (%rdi)
    movq %rcx, -8(%rdi,%rdx)
    ret
5:  testq %rdx, %rdx
    jz 6f
    movb %cl, (%rdi)
    incq %rdi
    decq %rdx
    jmp 5b
6:  ret

bcmp:
memcmp:
    xorl %ecx, %ecx
1:  leaq 8(%rcx), %r8
    cmpq %rdx, %r8
    ja 2f
    movq (%rdi,%rcx), %rax
    cmpq (%rsi,%rcx), %rax
    jne 2f                          # the differing byte is found by the loop below
    movq %r8, %rcx
    jmp 1b
2:  cmpq %rdx, %rcx
    jae 3f
    movzbl (%rdi,%rcx), %eax
    movzbl (%rsi,%rcx), %r8d
    subl %r8d, %eax
    jne 4f
    incq %rcx
    jmp 2b
3:  xorl %eax, %eax
4:  ret

strlen:
    xorl %eax, %eax
1:  cmpb $0, (%rdi,%rax)
    je 2f
    incq %rax
    jmp 1b
2:  ret
