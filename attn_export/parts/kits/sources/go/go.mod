module attn

go 1.19
