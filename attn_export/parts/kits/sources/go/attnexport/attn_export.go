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

const version = 1

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

func (e *Error) Error() string                 { return e.Text }
func wrong(format string, values ...any) error { return &Error{2, fmt.Sprintf(format, values...)} }

// call makes a call in one thread, because the library keeps an error for the thread that failed.
func call(function func() C.int) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if code := function(); code != 0 {
		return &Error{int(code), C.GoString(C.attn_last_error())}
	}
	return nil
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
	if C.attn_abi_version() != version {
		return nil, &Error{9, fmt.Sprintf("the library is not of version %d", version)}
	}
	name, path, given := C.CString(folder), (*C.char)(nil), C.CString(ort)
	defer C.free(unsafe.Pointer(name))
	defer C.free(unsafe.Pointer(given))
	if ort != "" {
		path = given
	}
	b, spins := &Bundle{}, map[bool]C.int32_t{true: 1}[spin]
	return b, call(func() C.int { return C.attn_open(version, name, path, C.int32_t(threads), spins, &b.number) })
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

// TestCase runs a golden case; it returns whether it passed, and a line.
func (b *Bundle) TestCase(index int64) (bool, string, error) {
	var line [512]C.char
	err := call(func() C.int { return C.attn_test_case(b.number, C.int64_t(index), &line[0], 512) })
	passed := err == nil
	if failed, is := err.(*Error); is && failed.Code == 8 {
		err = nil
	}
	return passed, C.GoString(&line[0]), err
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
		return nil, wrong("there are %d ids and %d types: %v", len(ids), len(types), err)
	}
	first, total := numbers(ids)
	each, count := numbers(lengths)
	kinds, _ := numbers(types)
	size := C.int64_t(len(flat) - 1)
	return vectors, call(func() C.int { return C.attn_embed(b.number, first, kinds, total, each, count, (*C.float)(&flat[0]), size) })
}

// Session has inputs, outputs, and the caches in between. Close frees its arrays, too.
type Session struct {
	handle
	inputs, outputs []Value
	arrays          []unsafe.Pointer // by input: memory of C, because the library keeps pointers
}

// Session makes a session.
func (b *Bundle) Session() (*Session, error) {
	inputs, _ := b.Values(Inputs)
	outputs, _ := b.Values(Outputs)
	s := &Session{inputs: inputs, outputs: outputs, arrays: make([]unsafe.Pointer, len(inputs))}
	return s, call(func() C.int { return C.attn_session(b.number, &s.number) })
}

// Close closes the session and frees its arrays.
func (s *Session) Close() error {
	err := s.handle.Close()
	for at := 0; err == nil && at < len(s.arrays); at++ {
		C.free(s.arrays[at])
	}
	return err
}

// Number is a type of elements: float16 and bfloat16 are uint16, and the bytes of any type are byte.
type Number interface {
	float32 | float64 | int64 | int32 | uint32 | uint64 | uint16 | byte
}

func size[T Number]() int64 {
	var zero T
	return int64(unsafe.Sizeof(zero))
}

// find returns the index of a value whose elements are as large, or bytes.
func find[T Number](values []Value, name string) (int, error) {
	for at, value := range values {
		if value.Name == name && (size[T]() == 1 || size[T]() == int64(value.ElementBytes)) {
			return at, nil
		}
	}
	return 0, wrong("there is no %s of elements of %d bytes", name, size[T]())
}

// SetInput makes an input of zeros; the elements that it returns are read at each run.
func SetInput[T Number](s *Session, name string, dims []int64) ([]T, error) {
	at, err := find[T](s.inputs, name)
	if err != nil {
		return nil, err
	}
	count, raw := int64(s.inputs[at].ElementBytes), C.attn_value{dtype: C.int32_t(s.inputs[at].DType), rank: C.int32_t(len(dims))}
	for i := range dims {
		if i >= len(raw.dims) || dims[i] < 0 || (dims[i] > 0 && count > (1<<40)/dims[i]) {
			return nil, wrong("%s cannot have the sizes %v", name, dims)
		}
		raw.dims[i], count = C.int64_t(dims[i]), count*dims[i]
	}
	raw.data, raw.bytes = C.calloc(C.size_t(count)+1, 1), C.int64_t(count)
	if err := call(func() C.int { return C.attn_set_input(s.number, C.int64_t(at), &raw) }); err != nil {
		C.free(raw.data)
		return nil, err
	}
	C.free(s.arrays[at])
	s.arrays[at] = raw.data
	return unsafe.Slice((*T)(raw.data), count/size[T]()), nil
}

// Output tells an output of the last run, in place: its sizes and elements, valid until the next run.
func Output[T Number](s *Session, name string) ([]int64, []T, error) {
	var raw C.attn_value
	at, err := find[T](s.outputs, name)
	if err == nil {
		err = call(func() C.int { return C.attn_output(s.number, C.int64_t(at), &raw) })
	}
	if err != nil {
		return nil, nil, err
	}
	return append([]int64{}, unsafe.Slice((*int64)(&raw.dims[0]), int(raw.rank))...), unsafe.Slice((*T)(raw.data), int64(raw.bytes)/size[T]()), nil
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
	f := &Session{inputs: s.inputs, outputs: s.outputs, arrays: make([]unsafe.Pointer, len(s.inputs))}
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
	if ended, is := err.(*Error); is && ended.Code == 1 {
		return 0, false, nil
	}
	return token, err == nil, err
}
