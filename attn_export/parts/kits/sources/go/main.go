// Tests the bundle, runs it on an array of your own, decodes, generates, and embeds.
package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	attn "attn/attnexport"
)

const usage = "usage: attn self-test [BUNDLE] | run IN.npy BATCH OUT.npy | decode [TOKENS] | generate ID,ID,... [TOKENS] | embed ID,ID,..."

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

// run runs the bundle on the rows of a file, which are repeated until there are so many as the batch.
func run(path string, batch int64, out string) {
	bundle := open("bundle", false)
	session := must(bundle.Session())
	check(session.LoadInput(must(bundle.Values(attn.Inputs))[0].Name, path, batch))
	check(session.Prefill(0, nil))
	name := must(bundle.Values(attn.Outputs))[0].Name
	check(session.SaveOutput(name, out))
	dims, _, err := attn.Output[byte](session, name)
	check(err)
	fmt.Println(out+":", name, dims)
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
