// Tests the bundle, runs it on an array of your own, decodes, generates, and embeds.
package main

import (
	"bytes"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"

	attn "attn/attnexport"
)

const usage = "usage: attn self-test [BUNDLE] | run IN.npy BATCH OUT.npy | decode [TOKENS] | generate ID,ID,... [TOKENS] | embed ID,ID,..."

var types = map[string]int{"f4": 1, "u1": 2, "i1": 3, "u2": 4, "i2": 5, "i4": 6, "i8": 7, "b1": 9, "f2": 10, "f8": 11, "u4": 12}
var header = regexp.MustCompile(`'descr': *'[<|](\w+)', *'fortran_order': *False, *'shape': *\(([\d, ]*)\)`)

func open(folder string, spin bool) *attn.Bundle {
	return must(attn.Open(folder, os.Getenv("ORT_DYLIB_PATH"), 0, spin))
}

// must ends the program with a line after an error.
func must[T any](value T, err error) T {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	return value
}

func check(err error) { must(0, err) }

// number reads a number, or gives -1.
func number(text string) int64 {
	if value, err := strconv.ParseInt(text, 10, 64); err == nil {
		return value
	}
	return -1
}

func selfTest(folder string) bool {
	bundle := open(folder, false)
	count, good := must(bundle.Get(attn.Cases)), int64(0)
	for index := int64(0); index < count; index++ {
		passed, line, err := bundle.TestCase(index)
		check(err)
		if passed {
			good++
		}
		fmt.Println(line)
	}
	fmt.Printf("%s: %d of %d passed, ONNX Runtime %s\n", bundle.Text(0), good, count, bundle.Text(1))
	return good == count
}

// readNpy reads an array: its type as in ONNX, its sizes, and its bytes.
func readNpy(path string) (int, []int64, []byte) {
	file := must(os.ReadFile(path))
	found, end := []string(nil), 0
	if bytes.HasPrefix(file, []byte("\x93NUMPY\x01")) && len(file) >= 10 {
		end = 10 + int(file[8]) + 256*int(file[9])
	}
	if end > 0 && end <= len(file) {
		found = header.FindStringSubmatch(string(file[10:end]))
	}
	if found == nil || types[found[1]] == 0 {
		check(fmt.Errorf("%s is no .npy of numbers in C order", path))
	}
	dims := []int64{}
	for _, size := range strings.FieldsFunc(found[2], func(r rune) bool { return r == ',' || r == ' ' }) {
		dims = append(dims, number(size))
	}
	return types[found[1]], dims, file[end:]
}

func writeNpy(path string, dtype int, dims []int64, data []byte) {
	kind, sizes := "<u2", ""
	for name, code := range types {
		if code == dtype {
			kind = map[bool]string{true: "|", false: "<"}[strings.HasSuffix(name, "1")] + name
		}
	}
	for _, size := range dims {
		sizes += fmt.Sprintf("%d,", size)
	}
	text := fmt.Sprintf("{'descr': '%s', 'fortran_order': False, 'shape': (%s), }", kind, sizes)
	file := append([]byte("\x93NUMPY\x01\x00\x76\x00"), fmt.Sprintf("%-117s\n", text)...)
	check(os.WriteFile(path, append(file, data...), 0o644))
}

// run runs the bundle on the rows of a file, which are repeated until there are so many as the batch.
func run(path string, batch int64, out string) {
	bundle := open("bundle", false)
	dtype, dims, data := readNpy(path)
	session := must(bundle.Session())
	inputs := must(bundle.Values(attn.Inputs))
	if dtype != inputs[0].DType || len(dims) == 0 || dims[0] < 1 || batch < 1 {
		check(fmt.Errorf("%s is not %s of type %d, or the batch not from 1", path, inputs[0].Name, inputs[0].DType))
	}
	rows := dims[0]
	dims[0] = batch
	elements := must(attn.SetInput[byte](session, inputs[0].Name, dims))
	if int64(len(data))*batch != int64(len(elements))*rows || len(data) == 0 {
		check(fmt.Errorf("%s has %d bytes, which are not those of its sizes", path, len(data)))
	}
	for at := range elements {
		elements[at] = data[at%len(data)]
	}
	check(session.Prefill(0, nil))
	first := must(bundle.Values(attn.Outputs))[0]
	sizes, values, err := attn.Output[byte](session, first.Name)
	check(err)
	writeNpy(out, first.DType, sizes, values)
	fmt.Printf("%s: %s %v\n", out, first.Name, sizes)
}

// setZeros sets the inputs that a session does not make to zeros, for some tokens.
func setZeros(bundle *attn.Bundle, session *attn.Session, tokens int64) {
	for _, input := range must(bundle.Values(attn.Inputs)) {
		for at, axis := range input.Axes {
			if axis == "query_len" {
				input.Dims[at] = tokens
			} else if axis != "" {
				input.Dims[at] = 1
			}
		}
		if input.Needed {
			must(attn.SetInput[byte](session, input.Name, input.Dims))
		}
	}
}

func decode(tokens int64) {
	if tokens < 1 {
		check(fmt.Errorf("TOKENS is a number from 1"))
	}
	bundle := open("bundle", true)
	if must(bundle.Get(attn.Cache)) == 0 {
		fmt.Printf("%s has no KV cache: there is nothing to decode\n", bundle.Text(0))
		return
	}
	session := must(bundle.Session())
	setZeros(bundle, session, 8)
	check(session.Prefill(8+64, nil))
	setZeros(bundle, session, 1)
	start := time.Now()
	for made := int64(0); made < tokens; made++ {
		// Your program would write the next token into the elements that SetInput returned.
		if made > 0 && made%64 == 0 {
			check(session.Rewind(64))
		}
		check(session.Step())
	}
	each := time.Since(start).Seconds() * 1e3 / float64(tokens)
	fmt.Printf("%d tokens: %.4f ms per token, %d held\n", tokens, each, must(session.Get(attn.Held)))
}

// numbers reads ids with commas between them; what is no id is -1.
func numbers(ids string) (found []int64) {
	for _, id := range strings.Split(ids, ",") {
		if ids != "" {
			found = append(found, number(id))
		}
	}
	return
}

// embed prints the vectors of texts, in each word the ids of one.
func embed(words []string) {
	texts := [][]int64{}
	for _, word := range words {
		texts = append(texts, numbers(word))
	}
	for _, vector := range must(open("bundle", false).Embed(texts, nil)) {
		fmt.Println(strings.Trim(fmt.Sprint(vector), "[]"))
	}
}

func generate(ids string, count int64) {
	prompt, between := numbers(ids), ""
	session := must(open("bundle", true).Session())
	check(session.Start(prompt, count))
	for token, more, err := session.Next(); more || err != nil; token, more, err = session.Next() {
		check(err)
		fmt.Print(between, token)
		between = " "
	}
	fmt.Println()
}

func main() {
	words := append(append([]string{}, os.Args[1:]...), "", "", "")
	given := len(os.Args) - 1
	other := func(at int, text string) string {
		if at < given {
			return words[at]
		}
		return text
	}
	switch {
	case words[0] == "self-test" && given <= 2:
		if !selfTest(other(1, "bundle")) {
			os.Exit(1)
		}
	case words[0] == "run" && given == 4:
		run(words[1], number(words[2]), words[3])
	case words[0] == "decode" && given <= 2:
		decode(number(other(1, "64")))
	case words[0] == "generate" && (given == 2 || given == 3):
		generate(words[1], number(other(2, "64")))
	case words[0] == "embed" && given >= 2:
		embed(os.Args[2:])
	default:
		check(fmt.Errorf(usage))
	}
}
