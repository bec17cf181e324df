# memcpy and its family. In assembler, since LLVM would turn a loop in Rust into a call of itself; with SSE, since
# under emulation `rep movsb` copies 60 MB/s and 16-byte moves 500 MB/s. System V calling convention.

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
    movups -16(%rsi,%rdx), %xmm4    # the last 16 bytes, before anything is written over them
    leaq -16(%rdi,%rdx), %r8
    cmpq $64, %rdx
    jb 5f
1:  movups (%rsi), %xmm0
    movups 16(%rsi), %xmm1
    movups 32(%rsi), %xmm2
    movups 48(%rsi), %xmm3
    movups %xmm0, (%rdi)
    movups %xmm1, 16(%rdi)
    movups %xmm2, 32(%rdi)
    movups %xmm3, 48(%rdi)
    addq $64, %rsi
    addq $64, %rdi
    subq $64, %rdx
    cmpq $64, %rdx
    jae 1b
5:  cmpq $16, %rdx
    jb 6f
    movups (%rsi), %xmm0
    movups %xmm0, (%rdi)
    addq $16, %rsi
    addq $16, %rdi
    subq $16, %rdx
    jmp 5b
6:  movups %xmm4, (%r8)
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
1:  cmpq $16, %rdx
    jb 2f
    movups -16(%rsi,%rdx), %xmm0
    movups %xmm0, -16(%rdi,%rdx)
    subq $16, %rdx
    jmp 1b
2:  testq %rdx, %rdx
    jz 3f
    movb -1(%rsi,%rdx), %cl
    movb %cl, -1(%rdi,%rdx)
    decq %rdx
    jmp 2b
3:  ret

memset:
    movq %rdi, %rax
    movzbl %sil, %esi
    movabsq $0x0101010101010101, %rcx
    imulq %rsi, %rcx
    cmpq $16, %rdx
    jb 3f
    movq %rcx, %xmm0
    punpcklqdq %xmm0, %xmm0
    movups %xmm0, -16(%rdi,%rdx)
1:  cmpq $64, %rdx
    jb 2f
    movups %xmm0, (%rdi)
    movups %xmm0, 16(%rdi)
    movups %xmm0, 32(%rdi)
    movups %xmm0, 48(%rdi)
    addq $64, %rdi
    subq $64, %rdx
    jmp 1b
2:  cmpq $16, %rdx
    jb 4f
    movups %xmm0, (%rdi)
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
