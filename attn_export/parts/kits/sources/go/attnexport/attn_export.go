// Package attnexport runs a bundle in ONNX Runtime, through the C library in library/, whose
// attn_export.h is the reference.
package attnexport

// #cgo CFLAGS: -I${SRCDIR}/../library/src
// #cgo LDFLAGS: -L${SRCDIR}/../library/build -Wl,-rpath,${SRCDIR}/../library/build -lattn_export
// #include <stdlib.h>
// #include "attn_export.h"
import "C"

import (
	"fmt"
	"runtime"
	"unsafe"
)

const version = 2

// What Get tells.
const (
	Inputs, Outputs, Cases, Cache, Vocabulary, MostTokens, Width = 0, 1, 2, 3, 4, 5, 6
	Held, Copied                                                 = 16, 17
)

// Error is a code of attn_export.h, and one line.
type Error struct {
	Code int
	Text string
}

func (e *Error) Error() string { return e.Text }

// Code is the code of an error of this package, else 0.
func Code(err error) int {
	if failed, is := err.(*Error); is {
		return failed.Code
	}
	return 0
}

// call makes a call in one thread, because the library keeps an error for the thread that failed.
func call(function func() C.int) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if code := function(); code != 0 {
		return &Error{int(code), C.GoString(C.attn_last_error())}
	}
	return nil
}

// withTexts makes a call with two texts, NULL for an empty second one.
func withTexts(function func(one, other *C.char) C.int, one, other string) error {
	first, second := C.CString(one), (*C.char)(nil)
	defer C.free(unsafe.Pointer(first))
	if other != "" {
		second = C.CString(other)
		defer C.free(unsafe.Pointer(second))
	}
	return call(func() C.int { return function(first, second) })
}

// handle is an open bundle or session.
type handle struct{ number C.attn_handle }

// Get tells a number of a bundle or a session.
func (h *handle) Get(what int) (value int64, err error) {
	err = call(func() C.int { return C.attn_get(h.number, C.int32_t(what), (*C.int64_t)(&value)) })
	return
}

// Close closes it; it is an error while another goroutine uses it.
func (h *handle) Close() error { return call(func() C.int { return C.attn_close(h.number) }) }

// Value is an input or output. Dims are fixed sizes, or -1 where Axes has a name.
type Value struct {
	Name                string
	DType, ElementBytes int
	Needed              bool
	Dims                []int64
	Axes                []string
}

// Bundle is an open bundle. Goroutines may share it.
type Bundle struct{ handle }

// Open opens a folder; ort is the path of ONNX Runtime's library, or "": where the system finds it.
func Open(folder, ort string, threads int, spin bool) (*Bundle, error) {
	b, spins := &Bundle{}, map[bool]C.int32_t{true: 1}[spin]
	return b, withTexts(func(folder, ort *C.char) C.int {
		return C.attn_open(version, folder, ort, C.int32_t(threads), spins, &b.number)
	}, folder, ort)
}

// Text is the name of the bundle (0), or the version of ONNX Runtime (1).
func (b *Bundle) Text(what int) string { return C.GoString(C.attn_text(b.number, C.int32_t(what))) }

// Values tells the inputs (Inputs) or outputs (Outputs).
func (b *Bundle) Values(kind int) ([]Value, error) {
	count, err := b.Get(kind)
	values := make([]Value, count)
	for i := range values {
		var raw C.attn_value
		if err := call(func() C.int { return C.attn_describe(b.number, C.int32_t(kind), C.int64_t(i), &raw) }); err != nil {
			return nil, err
		}
		v := Value{Name: C.GoString(raw.name), DType: int(raw.dtype), ElementBytes: int(raw.element_bytes), Needed: raw.needed != 0}
		for at := 0; at < int(raw.rank); at++ {
			v.Dims, v.Axes = append(v.Dims, int64(raw.dims[at])), append(v.Axes, C.GoString(raw.axes[at]))
		}
		values[i] = v
	}
	return values, err
}

// TestCase runs a test case; it returns whether it passed, and a line.
func (b *Bundle) TestCase(index int64) (bool, string, error) {
	var line [512]C.char
	err := call(func() C.int { return C.attn_test_case(b.number, C.int64_t(index), &line[0], 512) })
	if Code(err) == 8 {
		return false, C.GoString(&line[0]), nil
	}
	return err == nil, C.GoString(&line[0]), err
}

// Embed makes the vectors of texts of token ids; types are those of all tokens, nil: 0.
func (b *Bundle) Embed(texts [][]int64, types []int64) ([][]float32, error) {
	width, err := b.Get(Width)
	ids, lengths, flat, vectors := []int64{}, []int64{}, make([]float32, int64(len(texts))*width+1), [][]float32{}
	for at, text := range texts {
		ids, lengths = append(ids, text...), append(lengths, int64(len(text)))
		vectors = append(vectors, flat[int64(at)*width:int64(at+1)*width])
	}
	if err != nil || (types != nil && len(types) != len(ids)) || len(ids) == 0 {
		return nil, &Error{2, fmt.Sprintf("there are %d ids and %d types: %v", len(ids), len(types), err)}
	}
	first, total := numbers(ids)
	each, count := numbers(lengths)
	kinds, _ := numbers(types)
	size := C.int64_t(len(flat) - 1)
	return vectors, call(func() C.int {
		return C.attn_embed(b.number, first, kinds, total, each, count, (*C.float)(&flat[0]), size)
	})
}

// Session has inputs, outputs, and the caches in between. Close frees the elements of its inputs, too.
type Session struct{ handle }

// Session makes a session.
func (b *Bundle) Session() (*Session, error) {
	s := &Session{}
	return s, call(func() C.int { return C.attn_session(b.number, &s.number) })
}

// Number is a type of elements: float16 and bfloat16 are uint16, and the bytes of any type are byte.
type Number interface {
	float32 | float64 | int64 | int32 | uint32 | uint64 | uint16 | byte
}

// types has the numbers that ONNX has for types, by a value of each.
var types = map[any]C.int32_t{float32(0): 1, float64(0): 11, int64(0): 7, int32(0): 6, uint32(0): 12, uint64(0): 13, uint16(0): 4, byte(0): 2}

func dtype[T Number]() (C.int32_t, int64) {
	var zero T
	return types[zero], int64(unsafe.Sizeof(zero))
}

// SetInput makes an input of zeros; the elements that it returns are read at each run.
func SetInput[T Number](s *Session, name string, dims []int64) ([]T, error) {
	kind, size := dtype[T]()
	raw := C.attn_value{name: C.CString(name), dtype: kind, rank: C.int32_t(len(dims))}
	defer C.free(unsafe.Pointer(raw.name))
	for at := 0; at < len(dims) && at < len(raw.dims); at++ {
		raw.dims[at] = C.int64_t(dims[at])
	}
	if err := call(func() C.int { return C.attn_set_input(s.number, &raw) }); err != nil {
		return nil, err
	}
	return unsafe.Slice((*T)(raw.data), int64(raw.bytes)/size), nil
}

// Output tells an output of the last run, in place: its sizes and elements, valid until the next run.
func Output[T Number](s *Session, name string) ([]int64, []T, error) {
	var raw C.attn_value
	kind, size := dtype[T]()
	err := withTexts(func(name, _ *C.char) C.int { return C.attn_output(s.number, name, kind, &raw) }, name, "")
	if err != nil {
		return nil, nil, err
	}
	return append([]int64{}, unsafe.Slice((*int64)(&raw.dims[0]), int(raw.rank))...), unsafe.Slice((*T)(raw.data), int64(raw.bytes)/size), nil
}

// LoadInput sets an input to the rows of a .npy file, again from the first until there are so many.
func (s *Session) LoadInput(name, path string, rows int64) error {
	return withTexts(func(n, p *C.char) C.int { return C.attn_load_input(s.number, n, p, C.int64_t(rows)) }, name, path)
}

// SaveOutput writes an output of the last run to a .npy file.
func (s *Session) SaveOutput(name, path string) error {
	return withTexts(func(n, p *C.char) C.int { return C.attn_save_output(s.number, n, p) }, name, path)
}

func numbers(of []int64) (*C.int64_t, C.int64_t) {
	if len(of) == 0 {
		return nil, 0
	}
	return (*C.int64_t)(&of[0]), C.int64_t(len(of))
}

// Run runs once with the inputs that were set, all of them; Step runs more tokens of each row.
func (s *Session) Run() error  { return call(func() C.int { return C.attn_run(s.number) }) }
func (s *Session) Step() error { return call(func() C.int { return C.attn_step(s.number) }) }

// Rewind drops the last tokens of each row.
func (s *Session) Rewind(n int64) error {
	return call(func() C.int { return C.attn_rewind(s.number, C.int64_t(n)) })
}

// Prefill runs the first tokens; lengths are those of each row without its padding, nil: all.
func (s *Session) Prefill(capacity int64, lengths []int64) error {
	start, count := numbers(lengths)
	return call(func() C.int { return C.attn_prefill(s.number, C.int64_t(capacity), start, count) })
}

// Fork makes a session with copies of the caches of rows.
func (s *Session) Fork(rows []int64) (*Session, error) {
	start, count := numbers(rows)
	f := &Session{}
	return f, call(func() C.int { return C.attn_fork(s.number, start, count, &f.number) })
}

// Start begins a text of at most count tokens after token ids.
func (s *Session) Start(ids []int64, count int64) error {
	start, length := numbers(ids)
	return call(func() C.int { return C.attn_start(s.number, start, length, C.int64_t(count)) })
}

// Next makes the next token; it returns whether there was one.
func (s *Session) Next() (token int64, more bool, err error) {
	err = call(func() C.int { return C.attn_next(s.number, (*C.int64_t)(&token)) })
	if Code(err) == 1 {
		return 0, false, nil
	}
	return token, err == nil, err
}
