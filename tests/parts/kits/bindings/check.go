// What a program in Go gets from the library: check BUNDLE BROKEN... Each line is a fact.
package main

import (
	"fmt"
	"os"
	"sync"

	attn "attn/attnexport"
)

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func fine(err error) { must(0, err) }

func ready(bundle *attn.Bundle) (*attn.Session, []float32) {
	session := must(bundle.Session())
	must(attn.SetInput[float32](session, "query", []int64{1, 4, 16}))
	fine(session.Prefill(64, nil))
	return session, must(attn.SetInput[float32](session, "query", []int64{1, 1, 16}))
}

// steps runs steps that go back before the cache is full; it returns an element of the last output.
func steps(session *attn.Session, query []float32, count int) float32 {
	for i := 0; i < count; i++ {
		if must(session.Get(attn.Held)) == 64 {
			fine(session.Rewind(60))
		}
		query[0] = 0.5
		fine(session.Step())
	}
	_, output, err := attn.Output[float32](session, "output")
	fine(err)
	return output[0]
}

func code(err error) int {
	if failed, is := err.(*attn.Error); is {
		return failed.Code
	}
	return 0
}

func tryBundle(folder string) error {
	bundle, err := attn.Open(folder, "", 1, false)
	if err != nil {
		return err
	}
	defer bundle.Close()
	for index := int64(0); index < must(bundle.Get(attn.Cases)); index++ {
		passed, line, err := bundle.TestCase(index)
		if err != nil {
			return err
		} else if !passed {
			return &attn.Error{Code: 8, Text: line}
		}
	}
	return nil
}

func resident() (kib int) {
	var a, b int
	fmt.Sscan(string(must(os.ReadFile("/proc/self/statm"))), &a, &b)
	return b * 4
}

func main() {
	bundle := must(attn.Open(os.Args[1], "", 1, false))
	fresh := must(bundle.Session())
	fmt.Println("step without a prefill:", code(fresh.Step()))
	_, err := attn.SetInput[float32](fresh, "query", []int64{1, 1, 15})
	fmt.Println("wrong size:", code(err))
	_, err = attn.SetInput[float64](fresh, "query", []int64{1, 1, 16})
	fmt.Println("wrong type:", code(err))
	session, query := ready(bundle)
	_, err = session.Fork([]int64{1})
	fmt.Println("wrong row:", code(err))
	_, _, err = attn.Output[float32](fresh, "output")
	fmt.Println("output before a run:", code(err))
	fine(fresh.Close())
	fmt.Println("closed:", code(fresh.Step()), code(fresh.Close()))
	for _, folder := range os.Args[2:] {
		fmt.Println("broken:", code(tryBundle(folder)))
	}
	var group sync.WaitGroup
	var together [2]float32
	var codes [2]map[int]bool
	for i := range together {
		group.Add(1)
		go func(i int) {
			defer group.Done()
			own, query := ready(bundle)
			together[i] = steps(own, query, 200)
			fine(own.Close())
			codes[i] = map[int]bool{}
			for n := 0; n < 200; n++ { // one session, two goroutines
				codes[i][code(session.Rewind(0))] = true
			}
		}(i)
	}
	group.Wait()
	fmt.Println("two threads agree:", together[0] == together[1])
	for _, seen := range codes {
		delete(seen, 0)
		delete(seen, 4)
		fmt.Println("other codes of one session in two threads:", len(seen))
	}
	fine(bundle.Close()) // its sessions still work
	steps(session, query, 1000)
	before := resident()
	steps(session, query, 10000)
	fmt.Println("copied:", must(session.Get(attn.Copied)))
	fmt.Println("grown:", resident()-before)
	fine(session.Close())
}
